"""What this router knows of each worker, and the connections to it.

Entry: ``pool.WorkerPool``, which owns the sessions; a prefill call belongs to its leg. Runs enter; tokens leave to the
run's writer, reports and its end to its listener.
"""
