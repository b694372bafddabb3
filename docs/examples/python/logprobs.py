"""Generate: the logprob of each token, and of its alternatives."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

with decant.Client(ADDRESS) as client:
    answer = client.generate("import ", max_tokens=5, temperature=0, logprobs=3, timeout=60)
    for token in answer.logprobs:
        others = ", ".join(f"{top.token!r} {top.logprob:.2f}" for top in token.top)
        print(f"{token.token!r} {token.logprob:.2f}, rank {token.rank}, of {others}")
