"""A KV cache changes owner: ticket and lease, sender, receiver, transport.

The receiver pulls blocks while the sender's engine fills them, verifies every checksum, and owns the sequence once the
commit matches. Every block that either side keeps has an owner that releases it.
"""
