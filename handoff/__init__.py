"""A KV cache changes owner: ticket and lease, the giving end, the taking end, and what carries the bytes.

The giver's engine fills blocks; the taker pulls them while they fill, verifies every sum, and owns the sequence when
the seal agrees. Neither end holds a block without somebody who releases it.
"""
