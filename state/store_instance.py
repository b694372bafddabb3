"""Identity of the data in Redis, created by a router at first use or after Redis was emptied.

Owners that see another one write their requests again; until then an unknown id may still appear.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from decant.state import keys, scripts
from decant.state.client import Client
from decant.state.errors import StoreRefilling, UnknownRequest
from decant.state.ids import RequestKey
from decant.state.keys import Ttls


@dataclass(frozen=True)
class InstanceStatus:
    id: str  # random
    age_s: float
    refill_left_s: float  # 0: owners have written their requests again; an unknown one does not exist


class StoreInstance:
    def __init__(self, client: Client, ttls: Ttls) -> None:
        self._client = client
        self._refill_s = ttls.refill_s

    async def current(self) -> InstanceStatus:
        id_, age_ms = await self._client.run(scripts.STORE_INSTANCE.call([keys.STORE_INSTANCE], secrets.token_hex(8)))
        age_s = max(0, age_ms) / 1000
        return InstanceStatus(id_.decode(), age_s, max(0.0, self._refill_s - age_s))

    async def unknown_error(self, key: RequestKey) -> UnknownRequest | StoreRefilling:
        left_s = (await self.current()).refill_left_s
        return StoreRefilling(key, left_s) if left_s > 0 else UnknownRequest(key)
