"""Moves of workers between pools: one at a time for each model, by whichever router claims it first."""

from __future__ import annotations

from decant.state import keys
from decant.state.client import Client
from decant.state.ids import Incarnation


class PoolMoves:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def claim(self, model: str, router: Incarnation, settle_s: float) -> bool:
        """Whether this router may move a worker of ``model`` now; then no router may for ``settle_s``."""
        value, lasts_ms = str(router), max(1, round(settle_s * 1000))
        return await self._client.execute("SET", keys.pool_move(model), value, "NX", "PX", lasts_ms) is not None
