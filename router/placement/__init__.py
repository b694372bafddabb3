"""Which workers run a request. Pure: a snapshot of the pools in, a choice out; no I/O and no clock.

The simulators in bench/ and decant/plan/simulation run the same code. Entry: ``policy``.
"""
