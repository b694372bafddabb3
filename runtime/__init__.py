"""Parts that every process uses."""
