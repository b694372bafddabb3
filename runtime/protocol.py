PROTOCOL = 4
"""Version of protos/worker.proto and its rules."""


def is_compatible(protocol: int, other: int = PROTOCOL) -> bool:
    """Whether two versions are the same or neighbours, which work together by the rules of the older one.

    That includes the next version, whose rules only the newer process knows.
    """
    return protocol > 0 and abs(protocol - other) <= 1
