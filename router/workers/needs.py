from __future__ import annotations

from typing import NamedTuple

from decant.protos import worker_pb2 as wire

_SINCE_4 = ("reasoning", "embedding")
_GUIDES_SINCE_4 = ("answer", "structural_tag")


class Needs(NamedTuple):
    """What a worker must have for a request: another one would refuse it, or ignore fields that it does not know."""

    adapter: str = ""  # digest; empty: none
    protocol: int = 0  # the lowest version with all of the request's fields


NO_NEEDS = Needs()


def needs_of(request: wire.EngineRequest) -> Needs:
    is_since_4 = (
        request.guide.WhichOneof("kind") in _GUIDES_SINCE_4
        or any(map(request.HasField, _SINCE_4))
        or request.prompt_logprobs_from > 0
    )
    return Needs(request.adapter, 4 if is_since_4 else 0)
