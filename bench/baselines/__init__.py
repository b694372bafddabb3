"""Baselines, each in its own environment."""
