"""ListModels, GetModel: the models, and how long a request may be."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

with decant.Client(ADDRESS) as client:
    for model in client.models():
        print(model.id, "at", model.revision, "with", model.vocab_size, "tokens")
    default = client.model()
    print("prompt and output together:", default.max_context_length)
    print("drawn by default with temperature", default.default_sampling.temperature)
