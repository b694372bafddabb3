"""From settings to a worker that is ready: load and measure the model, register."""
