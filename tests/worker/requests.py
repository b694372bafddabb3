from __future__ import annotations

from collections.abc import Container

from decant.engine.guides.compiler import GrammarCompiler
from decant.engine.request import Request
from decant.handoff.receiver import TransferResult
from decant.protos import worker_pb2 as wire
from decant.runtime.packed import unpack
from decant.worker.wire_codec import to_requests


def to_request(
    name: str,
    message: wire.EngineRequest,
    *,
    model: str,
    park_after: bool = False,
    guides: GrammarCompiler | None = None,
    adapters: Container[str] = (),
) -> Request:
    """Convert a request for one output."""
    (request,) = to_requests(name, message, model=model, park_after=park_after, guides=guides, adapters=adapters)
    return request


def tokens_of(result: TransferResult) -> list[int]:
    """Tokens of the one output that was handed over."""
    (output,) = result.outputs
    return list(unpack(output.tokens))
