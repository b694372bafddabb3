"""Which workers run a request. Pure: a snapshot of the pools in, a choice out; no I/O and no clock.

The simulator in bench/ runs the same code. Entry: ``policy``.
"""
