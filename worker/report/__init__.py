"""Audit, metrics, and changes of the prefix cache."""
