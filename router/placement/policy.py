"""Where a request goes: a snapshot of the workers in, one of them out. No clock, no network, no state.

                       tokens are written already,
    decode workers     or a handoff failed            prefill workers       the prompt starts
    none               any                            any                   from tokens, on any worker
    some               no                             some that can         on a prefill worker, then handoff
    some               no                             all are full          nowhere yet: it waits
    some               no                             none of that layout   from tokens, on a decode worker
    one that is near   no                             any                   from tokens, on that one
    some               yes                            any                   from tokens, on a decode worker

A role is a preference: it says who is asked first, never who may not be asked. A decode worker is near when it would
have computed the prompt before a cache could come: it is short, or most of it is cached there.

A prompt is read where the least work lies before its first token: the tokens queued there, and those of its own that
are not cached there. So a cached prefix and a short queue are weighed in one number. A worker decodes for longer than
it reads: there room comes first, for what is not cached, then the load; among equals whoever has more of the prompt,
and less to compute or to fetch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from decant.protos import worker_pb2 as wire
from decant.state.ids import Incarnation


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker that answers, as this router sees it now; what the router itself has just sent there is counted in."""

    incarnation: Incarnation
    role: wire.Role
    layout: int
    block_tokens: int
    free_blocks: int  # cached ones are as good as free
    sequences: int  # running and waiting
    queued_tokens: int  # to be computed before a new prompt's first
    cached_tokens: int = 0  # of the request in question, in the prefix cache there
    takes_prompts: bool = True
    has_capacity: bool = True  # False: it refused for lack of room and has not said more since
    avoided: bool = False  # it failed of late, or failed this request: taken when nobody else is left


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What is to be placed."""

    tokens: int
    from_tokens: bool = False
    session: str = ""  # whose prefix is likely this one's; empty: nobody's
    handoff_min_tokens: int = 0  # with fewer to compute, moving its cache costs more than computing it


@dataclass(frozen=True, slots=True)
class Placement:
    incarnation: Incarnation
    prefill: bool  # False: from tokens


def choose_first_worker(workers: Sequence[WorkerSnapshot], need: PlacementRequest) -> Placement | None:
    """Where a sequence starts. None: nowhere now, but that may change."""
    decode = [worker for worker in workers if worker.role != wire.ROLE_PREFILL]
    layouts = {worker.layout for worker in decode}
    prefill = [worker for worker in workers if worker.role == wire.ROLE_PREFILL and worker.layout in layouts]
    home = _home(decode or workers, need)
    if prefill and not need.from_tokens:
        near = _roomiest([worker for worker in decode if _is_near(worker, need)], need, home)
        if near is not None:
            return Placement(near.incarnation, prefill=False)
        found = _least_work(prefill, need)
        return None if found is None else Placement(found.incarnation, prefill=True)
    found = _roomiest([worker for worker in decode or workers if worker.takes_prompts], need, home)
    return None if found is None else Placement(found.incarnation, prefill=False)


def choose_decode_worker(
    workers: Sequence[WorkerSnapshot], need: PlacementRequest, layout: int, giver: Incarnation
) -> Incarnation | None:
    """Who takes over a cache. None: nobody now, but that may change."""
    fitting = [worker for worker in workers if worker.layout == layout and worker.incarnation != giver]
    able = [worker for worker in fitting if worker.role != wire.ROLE_PREFILL] or fitting
    found = _roomiest(able, need, _home(able, need))
    return None if found is None else found.incarnation


def _is_near(worker: WorkerSnapshot, need: PlacementRequest) -> bool:
    """Whether it would be computed there, beside the answers, before a cache could come."""
    if worker.avoided or not worker.takes_prompts or _lacks_capacity(worker, need):
        return False
    return worker.queued_tokens + need.tokens - worker.cached_tokens < need.handoff_min_tokens


def _least_work(workers: Sequence[WorkerSnapshot], need: PlacementRequest) -> WorkerSnapshot | None:
    home = _home(workers, need)

    def order(worker: WorkerSnapshot) -> tuple[bool, int, int]:
        return worker.avoided, worker.queued_tokens + _uncached(worker, need, home), worker.sequences

    return min((worker for worker in workers if worker.has_capacity and worker.takes_prompts), key=order, default=None)


def _roomiest(
    workers: Sequence[WorkerSnapshot], need: PlacementRequest, home: WorkerSnapshot | None
) -> WorkerSnapshot | None:
    def order(worker: WorkerSnapshot) -> tuple[bool, bool, int, int, int]:
        uncached = _uncached(worker, need, home)
        return worker.avoided, _lacks_capacity(worker, need), worker.sequences, uncached, -worker.free_blocks

    return min((worker for worker in workers if worker.has_capacity), key=order, default=None)


def _lacks_capacity(worker: WorkerSnapshot, need: PlacementRequest) -> bool:
    return worker.free_blocks * worker.block_tokens <= need.tokens - worker.cached_tokens


def _uncached(worker: WorkerSnapshot, need: PlacementRequest, home: WorkerSnapshot | None) -> int:
    return 1 if worker is home else need.tokens - worker.cached_tokens


def _home(workers: Sequence[WorkerSnapshot], need: PlacementRequest) -> WorkerSnapshot | None:
    """Who counts as if he held the prompt, while nobody is known to hold any of it: the same for every router and
    every request of a session, and another one for few sessions when workers come and go (rendezvous hashing)."""
    if not need.session or any(worker.cached_tokens for worker in workers):
        return None

    def draw(worker: WorkerSnapshot) -> bytes:
        return hashlib.blake2b(f"{worker.incarnation.id}\n{need.session}".encode(), digest_size=8).digest()

    return max(workers, key=draw, default=None)
