"""`/v1/embeddings`."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from decant.gateway import body_fields
from decant.gateway.errors import refused
from decant.gateway.generation import Caller
from decant.protos import inference_pb2 as pb

OPTIONS = frozenset({"dimensions", "pooling", "normalize", "cache_salt", "priority", "parse_special_tokens"})
KNOWN = OPTIONS | {"model", "input", "encoding_format", "user"}
NAMES: Mapping[str, str] = {"inputs": "input"}
"""The body's names of Decant's fields that differ, for errors."""


async def whole(caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
    """The embedding of each input. Raises ApiError for what Decant does not do."""
    body_fields.check(body, KNOWN)
    body_fields.text(body, "user")
    name = body_fields.text(body, "model")
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise refused("encoding_format", "float or base64", form)
    options: dict[str, Any] = body_fields.options_of(body, OPTIONS)
    made = await caller.client.embed(_inputs(body), timeout=caller.remaining(), model=name, **options)
    values = [_base64(one) if form == "base64" else list(one.values) for one in made.embeddings]
    return {
        "object": "list",
        "model": name or made.model,
        "data": [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(values)],
        "usage": {"prompt_tokens": made.usage.prompt_tokens, "total_tokens": made.usage.total_tokens},
    }


def _inputs(body: Mapping[str, Any]) -> str | Sequence[Any]:
    """One text, a list of texts, token ids, or a list of token ids."""
    given = body.get("input")
    if isinstance(given, list) and given:
        return [given] if type(given[0]) is int else given
    if not isinstance(given, str):
        raise refused("input", "a text, token ids, or a list of them that is not empty", given)
    return given


def _base64(embedding: pb.Embedding) -> str:
    return base64.b64encode(array("f", embedding.values).tobytes()).decode()
