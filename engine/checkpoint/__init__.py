"""Reads and checks model folders and hub repositories."""
