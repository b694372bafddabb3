"""What a worker reports of itself: audit, metrics, contents of its prefix cache."""
