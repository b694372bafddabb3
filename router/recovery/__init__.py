"""What outlives a stream or a router: the journal in Redis, registration, takeover of a lost router's requests."""
