"""GenerateStream: a model's reasoning, apart from its answer, with a limit."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

messages = [{"role": "user", "content": "Is 91 a prime number?"}]

with decant.Client(ADDRESS) as client:
    with client.stream(messages, max_tokens=200, max_reasoning_tokens=40, timeout=60) as stream:
        for delta in stream:
            print(delta.reasoning or delta.text, end="")
    print()
    print(stream.usage.reasoning_tokens, "tokens of reasoning in", stream.usage.completion_tokens)
    begun = [*messages, {"role": "assistant", "content": "No: it is 7 times"}]
    answer = client.generate(begun, continue_final_message=True, max_tokens=10, timeout=60)
    print(begun[-1]["content"] + answer.text)
