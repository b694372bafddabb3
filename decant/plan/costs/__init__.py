"""Seconds of prefills and decode steps: computed from a device, or measured."""
