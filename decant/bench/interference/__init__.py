"""What a long prompt does to running answers: a split deployment beside mixed ones on the same cores.

Each of `configurations` gets a deployment and some trials, which measure the gaps of the answers before, during and
after the prompt: from its sending to its second token. Then `verdict` and reports.
"""
