"""GenerateStream: the prompt is a conversation, rendered with the model's chat template."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

with decant.Client(ADDRESS) as client:
    messages = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": "A class for a stack."},
    ]
    try:
        with client.stream(messages, max_tokens=40, temperature=0, timeout=60) as answer:
            for delta in answer:
                print(delta.text, end="", flush=True)
        print()
        print("prompt tokens", answer.usage.prompt_tokens)
    except decant.InvalidArgument as error:  # this model has no template
        print(f"refused: {error.field}: {error.limit}, got {error.value}")
