"""Static against continuous batching, on the engine of this process."""
