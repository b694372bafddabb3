"""Benchmarks: model shapes, workloads, contenders in their own processes, and one report.

``python -m bench.engine`` compares the engine with static batches; ``python -m bench.scheduler_overhead`` times a
step without the model. No other package imports this one.
"""
