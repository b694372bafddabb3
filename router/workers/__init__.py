"""What this router knows of each worker, and the connections to it: pool, sessions, prefill calls."""
