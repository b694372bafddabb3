"""The parts of ``bench.engine``: contenders in their own processes, their figures, the machine's limits, reports."""
