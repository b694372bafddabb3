PROTOCOL = 3
"""Version of protos/worker.proto and its rules."""


def is_compatible(protocol: int) -> bool:
    """Whether a peer of version ``protocol`` is accepted: neighbours work together, by the rules of the older version.

    That includes the next version, whose rules only the newer process knows.
    """
    return protocol > 0 and abs(protocol - PROTOCOL) <= 1
