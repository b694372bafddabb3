"""Benchmarks of parts: each module here with ``main`` is a command (README.md), the packages are what they consist of.

Only tests import them.
"""
