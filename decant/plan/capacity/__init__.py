"""What fits on a device, and the shapes of models and devices."""
