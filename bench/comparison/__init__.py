"""The parts of ``bench.engine``."""
