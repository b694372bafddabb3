"""Score: how likely the model finds given continuations of one prompt."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")
PROMPT = "def is_even(n):\n    return n %"
CONTINUATIONS = [" 2 == 0", " 2 == 1", " 3 == 0"]

with decant.Client(ADDRESS) as client:
    response = client.score(PROMPT, CONTINUATIONS, timeout=60)
    for text, score in zip(CONTINUATIONS, response.scores, strict=True):
        tokens = " ".join(f"{token.token!r} {token.logprob:.2f}" for token in score.tokens)
        print(f"{score.logprob:.2f} {text!r}: {tokens}")
    print("prompt tokens, of the prompt once:", response.usage.prompt_tokens)

    try:
        client.score("def is_even(n):\n    re", ["turn n"])
    except decant.InvalidArgument as error:  # "re" and "turn" make one token together
        print(f"{error.field}: {error.limit}")
