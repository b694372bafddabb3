"""Tokenize, Detokenize: the tokens of a text, and back."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

with decant.Client(ADDRESS) as client:
    words = client.tokenize("def add(a, b):", add_special_tokens=False)
    print(words.count, "tokens:", list(words.tokens))
    print(client.detokenize(words.token_ids))
