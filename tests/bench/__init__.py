"""What a measurement must get right, not how fast anything is."""
