"""The client of Decant, and the namespace of its servers.

    >>> from decant import Client
    >>> with Client("localhost:50051") as client:
    ...     with client.stream("def add(a, b):", max_tokens=40) as stream:
    ...         for delta in stream:
    ...             print(delta.text, end="", flush=True)
    ...     print(f" ({stream.usage.completion_tokens} tokens, first after {stream.receipt.ttft_ms} ms)")
    return a + b (4 tokens, first after 5.0 ms)

`Client` blocks, `AsyncClient` awaits; they have the same methods, options and results. They load grpcio and
protobuf and no other package. `decant.router`, `decant.engine` and the other servers' packages load no client.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decant.client import *  # noqa: F403
    from decant.client import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """Load the client when one of its names is first used: servers and tools do without it."""
        if name == "__all__" or not name.startswith("_"):
            client = import_module("decant.client")
            if name == "__all__" or name in client.__all__:
                return getattr(client, name)
        raise AttributeError(f"module 'decant' has no attribute {name!r}")
