PROTOCOL = 3
"""Version of protos/worker.proto and its rules."""


def is_compatible(protocol: int) -> bool:
    return protocol in (PROTOCOL, PROTOCOL - 1) and protocol > 0
