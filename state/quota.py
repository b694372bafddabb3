"""Quotas of tenants. Leases expire when their router is lost.

Tokens are a bucket of `tokens_per_minute` that fills evenly. A lease charges the request's maximum, its release only
the tokens used. A full bucket admits any request, even a larger one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from decant.state import keys, scripts
from decant.state.client import Client
from decant.state.errors import QuotaExceeded
from decant.state.ids import RequestKey
from decant.state.keys import Ttls
from decant.state.scripts import Command

RETRY_IN_FLIGHT_S = 1.0  # it is unknown when one of the tenant's requests ends


@dataclass(frozen=True)
class TenantLimits:
    """Limits of a tenant; None for no limit."""

    in_flight: int | None = None  # requests
    tokens_per_minute: int | None = None  # of prompt and output, from 1

    def __post_init__(self) -> None:
        if self.in_flight is not None and self.in_flight < 0:
            raise ValueError(f"in_flight: from 0, got {self.in_flight}")
        if self.tokens_per_minute is not None and self.tokens_per_minute < 1:
            raise ValueError(f"tokens_per_minute: from 1, got {self.tokens_per_minute}")


class QuotaUsage(NamedTuple):
    key: RequestKey
    tokens: int
    limits: TenantLimits


class Quotas:
    def __init__(self, client: Client, ttls: Ttls) -> None:
        self.renew_every_s = ttls.quota_lease_s / 4  # three renewals may be lost
        self._client = client
        self._lease_ms = round(ttls.quota_lease_s * 1000)

    async def acquire(self, key: RequestKey, tokens: int, limits: TenantLimits) -> bool:
        """Acquire or renew a lease for at most `tokens`; True if it is new. Raises QuotaExceeded."""
        args = (key.id, tokens, self._lease_ms, _or_none(limits.in_flight), _or_none(limits.tokens_per_minute))
        reply = await self._client.run(scripts.QUOTA_ACQUIRE.call(list(keys.quota(key.tenant)), *args))
        if reply[0] == b"in_flight":
            raise QuotaExceeded("in_flight", limits.in_flight or 0, reply[1] + 1, RETRY_IN_FLIGHT_S)
        if reply[0] == b"tokens":
            limit = limits.tokens_per_minute or 0
            raise QuotaExceeded("tokens_per_minute", limit, reply[1] + tokens, reply[2] / 1000)
        return bool(reply[1])

    async def renew(self, requests: Iterable[RequestKey]) -> None:
        """Renew leases; call it every `renew_every_s`."""
        by_tenant = defaultdict[str, list[str]](list)
        for key in requests:
            by_tenant[key.tenant].append(key.id)
        await self._client.run_all([self._renew_command(tenant, ids) for tenant, ids in by_tenant.items()])

    async def release(self, key: RequestKey, tokens: int, limits: TenantLimits) -> None:
        await self.release_all([QuotaUsage(key, tokens, limits)])

    async def release_all(self, ended: Iterable[QuotaUsage]) -> None:
        await self._client.run_all([_release_command(*used) for used in ended])

    def _renew_command(self, tenant: str, ids: list[str]) -> Command:
        in_flight, charged, _ = keys.quota(tenant)
        return scripts.QUOTA_RENEW.call([in_flight, charged], self._lease_ms, *ids)


def _release_command(key: RequestKey, tokens: int, limits: TenantLimits) -> Command:
    args = (key.id, tokens, _or_none(limits.tokens_per_minute))
    return scripts.QUOTA_RELEASE.call(list(keys.quota(key.tenant)), *args)


def _or_none(limit: int | None) -> int | str:
    return "" if limit is None else limit
