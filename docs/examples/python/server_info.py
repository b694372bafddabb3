"""GetServerInfo: the router that answers, its limits, and what is not implemented."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

with decant.Client(ADDRESS) as client:
    info = client.server_info()
    print("router", info.router_id, "of version", info.version, "serves", info.default_model, "by default")
    print("at most", info.limits.max_logprobs, "alternatives per token")
    print("not implemented:", ", ".join(info.unimplemented_fields) or "nothing")
