"""Channels to peers: TLS, identity, heartbeats."""
