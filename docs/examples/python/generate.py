"""Generate: the whole output at once."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

with decant.Client(ADDRESS) as client:
    answer = client.generate("def read_lines(path):\n", max_tokens=60, temperature=0, timeout=60)
    print(answer.text)
    print(answer.finished.reason, answer.usage.completion_tokens, "tokens in", round(answer.receipt.e2e_ms), "ms")
