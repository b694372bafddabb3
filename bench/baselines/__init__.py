"""Baselines, each in its own environment. Every contender's module has a ``measure``."""
