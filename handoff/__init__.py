"""A KV cache changes owner: ticket and lease, the sender, the receiver, and the transport between them.

The sender's engine fills blocks; the receiver pulls them while they fill, verifies every checksum, and owns the
sequence once the commit matches. Every block that either side keeps has an owner that releases it.
"""
