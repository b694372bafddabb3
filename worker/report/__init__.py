"""A worker's reports: audit and metrics.

Entry: ``audit.Auditor`` and ``metrics.WorkerMetrics``. Events and state of host and services enter, an answer or
a scrape leaves. They own nothing of a run.
"""
