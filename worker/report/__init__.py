"""A worker's reports: audit, metrics, changes of its prefix cache."""
