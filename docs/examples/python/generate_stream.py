"""GenerateStream: the output as it is generated."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

with decant.Client(ADDRESS) as client:
    with client.stream("def read_lines(path):\n", max_tokens=60, temperature=0.7, stop="\n\n", timeout=60) as answer:
        for delta in answer:
            print(delta.text, end="", flush=True)
    print()
    print(answer.finished, answer.usage)
    print("again with seed", answer.started.seed, "on", answer.started.model)
