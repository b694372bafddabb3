"""The engine, on two devices: plain bytes, and tiny models."""
