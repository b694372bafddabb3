"""Moves of workers between pools, and of sequences between workers: by the router that claims one of a model first."""

from __future__ import annotations

from typing import Literal

from decant.state import keys
from decant.state.client import Client
from decant.state.ids import Incarnation
from decant.state.scripts import on_key

Moved = Literal["workers", "sequences"]


class PoolMoves:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def claim(self, model: str, what: Moved, router: Incarnation, settle_s: float) -> bool:
        """Whether this router may move something of ``model`` now; then no router may for ``settle_s``."""
        key, lasts_ms = keys.pool_move(model, what), max(1, round(settle_s * 1000))
        return await self._client.run(on_key("SET", key, str(router), "NX", "PX", lasts_ms)) is not None
