"""Benchmarks: each module here with ``main`` is a command (README.md). No other package imports this one."""
