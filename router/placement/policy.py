"""Choice of workers for a request from a snapshot.

                       output tokens exist already,
    decode workers     or a handoff failed            prefill workers       the prompt is computed
    none               any                            any                   from tokens, on any worker
    some               no                             some that can         on a prefill worker, then handoff
    some               no                             all are full          nowhere yet: the request waits
    some               no                             other layout hash     from tokens, on a decode worker
    a suitable one     no                             any                   from tokens, on that one
    some               yes                            any                   from tokens, on a decode worker

"From tokens": the decode worker computes the prompt. A suitable one would be done before a transferred KV cache
arrives. A role is a preference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from decant.protos import worker_pb2 as wire
from decant.state.ids import Incarnation

ADAPTER_LOAD_TOKENS, ADAPTER_LOAD_SEQUENCES = 1024, 8
"""Prompt tokens, and sequences in a batch, for which another worker is preferred to one that has to read the adapter:
more requests of one adapter than that spread over workers.
"""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """Load of a worker, including what this router has just sent there."""

    incarnation: Incarnation
    role: wire.Role
    layout_hash: int
    block_size: int
    free_blocks: int  # including cached ones, which can be reused
    sequences: int  # running and waiting
    queued_tokens: int  # computed before a new prompt's first token
    cached_tokens: int = 0  # of the request, in the worker's prefix cache
    takes_prompts: bool = True
    has_capacity: bool = True  # False: it refused a request and has not reported its load since
    is_avoided: bool = False  # it failed recently or failed this request: chosen last
    group_blocks: tuple[int, ...] = (0,)  # as in Capacity
    lacks_adapter: bool = False  # it has to read the request's adapter first

    @property
    def load_tokens(self) -> int:
        return ADAPTER_LOAD_TOKENS if self.lacks_adapter else 0

    @property
    def load_sequences(self) -> int:
        return ADAPTER_LOAD_SEQUENCES if self.lacks_adapter else 0


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    tokens: int
    from_tokens: bool = False
    session: str = ""  # requests of one session likely share a prefix; empty: none
    handoff_min_tokens: int = 0  # with fewer uncached tokens, a transfer costs more than computing them


@dataclass(frozen=True, slots=True)
class Placement:
    incarnation: Incarnation
    is_split: bool  # False: from tokens


def blocks_for(tokens: int, block_size: int, group_blocks: Sequence[int]) -> int:
    count = -(-tokens // block_size)
    return sum(min(count, most) if most else count for most in group_blocks)


def choose_first_worker(workers: Sequence[WorkerSnapshot], request: PlacementRequest) -> Placement | None:
    """Choose the worker that begins a request; None while no worker has capacity."""
    decode = [worker for worker in workers if worker.role != wire.ROLE_PREFILL]
    layout_hashes = {worker.layout_hash for worker in decode}
    prefill = [worker for worker in workers if worker.role == wire.ROLE_PREFILL and worker.layout_hash in layout_hashes]
    preferred = _session_affinity_worker(decode or workers, request)
    if prefill and not request.from_tokens:
        local = _least_loaded_decode(
            [worker for worker in decode if _prefers_local_prefill(worker, request)], request, preferred
        )
        if local is not None:
            return Placement(local.incarnation, is_split=False)
        choice = _least_work(prefill, request)
        return None if choice is None else Placement(choice.incarnation, is_split=True)
    choice = _least_loaded_decode([worker for worker in decode or workers if worker.takes_prompts], request, preferred)
    return None if choice is None else Placement(choice.incarnation, is_split=False)


def choose_prompt_worker(
    workers: Sequence[WorkerSnapshot], request: PlacementRequest, preferred: Incarnation | None = None
) -> Incarnation | None:
    """Choose the worker that computes a prompt of which nothing is decoded; None while no worker has capacity.

    A decode worker does where no prefill worker is left. ``preferred`` goes before others of its role, if it can.
    """
    prefill = [worker for worker in workers if worker.role == wire.ROLE_PREFILL]
    candidates = prefill or workers
    first = [worker for worker in candidates if worker.incarnation == preferred and not worker.is_avoided]
    choice = _least_work(first, request) or _least_work(candidates, request)
    return None if choice is None else choice.incarnation


def choose_decode_worker(
    workers: Sequence[WorkerSnapshot], request: PlacementRequest, layout_hash: int, sender: Incarnation
) -> Incarnation | None:
    """Choose the receiver of a KV cache; None while no worker can receive it."""
    candidates = [worker for worker in workers if worker.layout_hash == layout_hash and worker.incarnation != sender]
    decode = [worker for worker in candidates if worker.role != wire.ROLE_PREFILL] or candidates
    choice = _least_loaded_decode(decode, request, _session_affinity_worker(decode, request))
    return None if choice is None else choice.incarnation


def _prefers_local_prefill(worker: WorkerSnapshot, request: PlacementRequest) -> bool:
    if worker.is_avoided or not worker.takes_prompts or _lacks_capacity(worker, request):
        return False
    return worker.queued_tokens + request.tokens - worker.cached_tokens < request.handoff_min_tokens


def _least_work(workers: Sequence[WorkerSnapshot], request: PlacementRequest) -> WorkerSnapshot | None:
    preferred = _session_affinity_worker(workers, request)

    def order(worker: WorkerSnapshot) -> tuple[bool, int, int]:
        tokens = worker.queued_tokens + _uncached(worker, request, preferred) + worker.load_tokens
        return worker.is_avoided, tokens, worker.sequences

    return min((worker for worker in workers if worker.has_capacity and worker.takes_prompts), key=order, default=None)


def _least_loaded_decode(
    workers: Sequence[WorkerSnapshot], request: PlacementRequest, preferred: WorkerSnapshot | None
) -> WorkerSnapshot | None:
    def order(worker: WorkerSnapshot) -> tuple[bool, bool, int, int, int]:
        uncached = _uncached(worker, request, preferred)
        sequences = worker.sequences + worker.load_sequences
        return worker.is_avoided, _lacks_capacity(worker, request), sequences, uncached, -worker.free_blocks

    return min((worker for worker in workers if worker.has_capacity), key=order, default=None)


def _lacks_capacity(worker: WorkerSnapshot, request: PlacementRequest) -> bool:
    uncached = request.tokens - worker.cached_tokens
    return worker.free_blocks < blocks_for(uncached + 1, worker.block_size, worker.group_blocks)


def _uncached(worker: WorkerSnapshot, request: PlacementRequest, preferred: WorkerSnapshot | None) -> int:
    return 1 if worker is preferred else request.tokens - worker.cached_tokens


def _session_affinity_worker(workers: Sequence[WorkerSnapshot], request: PlacementRequest) -> WorkerSnapshot | None:
    """Worker that counts as having the prompt cached while no worker is known to.

    Rendezvous hashing: it is the same at all routers, and few sessions move when workers come and go.
    """
    if not request.session or any(worker.cached_tokens for worker in workers):
        return None

    def draw(worker: WorkerSnapshot) -> bytes:
        return hashlib.blake2b(f"{worker.incarnation.id}\n{request.session}".encode(), digest_size=8).digest()

    return max(workers, key=draw, default=None)
