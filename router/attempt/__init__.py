"""One try at one request: which workers run it, in which order. All that it holds at workers is a leg.

Entry: ``attempt``.
"""
