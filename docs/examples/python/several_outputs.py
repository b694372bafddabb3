"""Several outputs of one prompt, which is computed once: as they come, and the best of six."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")
PROMPT = "def is_even(number):\n"

with decant.Client(ADDRESS) as client:
    with client.stream(PROMPT, n=3, max_tokens=24, temperature=0.8, seed=7, timeout=60) as answer:
        for delta in answer:
            print(delta.index, repr(delta.text))
    for output in answer.outputs:
        print(f"output {output.index} ends by {output.finished.reason.value}: {output.text!r}")
    print(answer.usage.prompt_tokens, "prompt tokens, computed once;", answer.usage.completion_tokens, "output tokens")

    best = client.generate(PROMPT, best_of=6, max_tokens=24, temperature=0.8, seed=7, timeout=60)
    print("the likeliest of six:", repr(best.text))
