"""Embed: texts as vectors, of which near ones are texts that the model takes for alike."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")
TEXTS = ["def add(a, b):\n    return a + b\n", "def sub(a, b):\n    return a - b\n", "import os\nimport sys\n"]

with decant.Client(ADDRESS) as client:
    response = client.embed(TEXTS, pooling="mean", timeout=60)
    add, sub, imports = (list(embedding.values) for embedding in response.embeddings)


def similarity(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))  # they have length 1


print(len(add), "values each")
print(f"the other function: {similarity(add, sub):.3f}, the imports: {similarity(add, imports):.3f}")
