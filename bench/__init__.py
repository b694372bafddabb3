"""Measurements: shapes and workloads to measure on, contenders in processes of their own, one report.

``python -m bench.engine`` times the engine beside static batches; ``python -m bench.scheduler_overhead`` times what a
step costs apart from the model. Nothing imports this package.
"""
