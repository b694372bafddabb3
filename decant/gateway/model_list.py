"""`/v1/models`: the models that the caller may use, and their adapters, whose names are names of models too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from decant.client import AsyncClient
from decant.gateway.errors import ApiError
from decant.protos import inference_pb2 as pb
from decant.runtime.error_details import shorten


async def listed(client: AsyncClient, created: int) -> dict[str, Any]:
    return {"object": "list", "data": [one for model in await client.models() for one in _objects(model, created)]}


async def one(client: AsyncClient, name: str, created: int) -> dict[str, Any]:
    """Raises ApiError for an unknown model."""
    for found in (await listed(client, created))["data"]:
        if found["id"] == name:
            return dict(found)
    raise ApiError(404, f"model: there is no {shorten(name)}", code="model_not_found", param="model")


def _objects(model: pb.Model, created: int) -> Iterator[dict[str, Any]]:
    common = {"object": "model", "created": created, "owned_by": "decant", "max_model_len": model.max_context_length}
    yield {"id": model.id, **common, "root": model.id, "parent": None}
    for adapter in model.adapters:
        yield {"id": adapter.name, **common, "root": adapter.name, "parent": model.id}
