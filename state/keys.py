"""All keys in Redis, with type and lifetime.

key                                   type    holds                                              lifetime
decant:{tenant/id}:request            hash    epoch, attempt, state: integers                    open_s from the last
                                              owner: incarnation/id of a router                  write; ended_s from
                                              record: RequestRecord                              the end
                                              payload: GenerateRequest as accepted
                                              digest: SHA-256 of payload
                                              prompt_logprobs: if requested, see logprobs.py
                                              stream_epoch: the last epoch that a client's new
                                              stream started
decant:{tenant/id}:journal            string  entries, 4 bytes each, see journal.py              as the request's
decant:{tenant/id}:logprobs           string  one for each entry, if requested                   as the request's
decant:{workers|routers}:peers        hash    i:<id> incarnation; s:<id> first registered, in    directory_s from the
                                              microseconds; f:<id> Worker-/RouterRegistration;   last renewal
                                              l:<id> Load
decant:{workers|routers}:expiry       zset    id -> end of its registration, in ms               as peers
decant:{workers|routers}:changes      stream  one entry: when the directory changed              as peers
decant:{routers}:open:<router>        set     tenant/id of a router's unfinished requests        open_s from the last
                                                                                                 addition
decant:{routers}:owners               set     routers that have an open set                      as the open sets
decant:{results}:ended                zset    tenant/id of an ended request -> its end, in ms    ended_s from the last
                                                                                                 addition
decant:{results}:bytes                hash    tenant/id -> bytes of its keys; total: their sum   as ended
decant:{quota/tenant}:in_flight       zset    request id -> end of its lease, in ms              quota_lease_s
decant:{quota/tenant}:charged         hash    request id -> tokens charged for it                as in_flight
decant:{quota/tenant}:full_at         string  when the tenant's minute is full again, in         until then
                                              microseconds
decant:{pools}:<what>:<model>         string  router that moved workers or sequences last        until the next may
decant:{store_instance}               hash    id: random, 16 hexadecimal digits; began: in ms    until Redis is emptied

All times are by the clock of Redis. The key prefix comes before all names. In a Cluster it is a hash tag, and decides
the slot of all keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from decant.state.ids import Incarnation, RequestKey

DirectoryKind = Literal["workers", "routers"]

STORE_INSTANCE = "decant:{store_instance}"
OWNERS = "decant:{routers}:owners"
RESULTS = ("decant:{results}:ended", "decant:{results}:bytes")


@dataclass(frozen=True)
class Ttls:
    """Lifetimes in seconds since the last write or renewal."""

    open_s: float = 24 * 3600.0  # an unfinished request
    ended_s: float = 3600.0  # a result
    registration_s: float = 5.0  # a worker or router
    directory_s: float = 24 * 3600.0  # an index
    quota_lease_s: float = 30.0  # a tenant's request in flight
    refill_s: float = 10.0  # after Redis was emptied: owners write their requests again

    @property
    def renew_every_s(self) -> float:
        """Interval of renewals; three may be lost."""
        return self.registration_s / 4


def request(key: RequestKey) -> str:
    return f"decant:{{{key}}}:request"


def journal(key: RequestKey) -> str:
    return f"decant:{{{key}}}:journal"


def logprobs(key: RequestKey) -> str:
    return f"decant:{{{key}}}:logprobs"


def of_request(key: RequestKey) -> list[str]:
    return [request(key), journal(key), logprobs(key)]


def peers(kind: DirectoryKind) -> str:
    return f"decant:{{{kind}}}:peers"


def expiry(kind: DirectoryKind) -> str:
    return f"decant:{{{kind}}}:expiry"


def changes(kind: DirectoryKind) -> str:
    return f"decant:{{{kind}}}:changes"


def open_set(router: Incarnation) -> str:
    return f"decant:{{routers}}:open:{router}"


def pool_move(model: str, what: str) -> str:
    return f"decant:{{pools}}:{what}:{quote(model, safe='')}"


def quota(tenant: str) -> tuple[str, str, str]:
    prefix = f"decant:{{quota/{quote(tenant, safe='')}}}"
    return f"{prefix}:in_flight", f"{prefix}:charged", f"{prefix}:full_at"
