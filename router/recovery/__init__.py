"""What outlives a router: its registration, and takeover of a lost router's requests."""
