"""Which workers run a request. Pure: no I/O and no clock; the simulator in bench/ runs the same code."""
