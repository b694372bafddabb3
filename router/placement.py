"""Where a request goes: a snapshot of the workers in, one of them out. No clock, no network, no state.

                       tokens are written already,
    decode workers     or a handoff failed            prefill workers       the prompt starts
    none               any                            any                   from tokens, on any worker
    some               no                             some that can         on a prefill worker, then handoff
    some               no                             all are full          nowhere yet: it waits
    some               no                             none of that layout   from tokens, on a decode worker
    some               yes                            any                   from tokens, on a decode worker

A role is a preference: it says who is asked first, never who may not be asked.

A prompt is read where the least work lies before its first token: the tokens queued there, and those of its own that
are not cached there. So a cached prefix and a short queue are weighed in one number. A worker decodes for longer than
it reads: there room comes first, for what is not cached, then the load; among equals whoever has more of the prompt,
and less to compute or to fetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos import worker_pb2 as wire
from state.names import Life


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker that answers, as this router sees it now; what the router itself has just sent there is counted in."""

    life: Life
    role: wire.Role
    layout: int
    block_tokens: int
    free_blocks: int  # cached ones are as good as free
    sequences: int  # running and waiting
    queued_tokens: int  # to be computed before a new prompt's first
    cached_tokens: int = 0  # of the request in question, in the prefix cache there
    takes_prompts: bool = True
    has_room: bool = True  # False: it refused for lack of room and has not said more since
    avoided: bool = False  # it failed of late, or failed this request: taken when nobody else is left


@dataclass(frozen=True, slots=True)
class Place:
    life: Life
    prefill: bool  # False: from tokens


def first_place(workers: Sequence[Seen], tokens: int, *, from_tokens: bool) -> Place | None:
    """Where a sequence of so many tokens starts. None: nowhere now, but that may change."""
    decode = [worker for worker in workers if worker.role != wire.ROLE_PREFILL]
    layouts = {worker.layout for worker in decode}
    prefill = [worker for worker in workers if worker.role == wire.ROLE_PREFILL and worker.layout in layouts]
    if prefill and not from_tokens:
        found = _least_work(prefill, tokens)
        return None if found is None else Place(found.life, prefill=True)
    found = _roomiest([worker for worker in decode or workers if worker.takes_prompts], tokens)
    return None if found is None else Place(found.life, prefill=False)


def taker(workers: Sequence[Seen], tokens: int, layout: int, giver: Life) -> Life | None:
    """Who takes over a cache of so many tokens. None: nobody now, but that may change."""
    fitting = [worker for worker in workers if worker.layout == layout and worker.life != giver]
    decode = [worker for worker in fitting if worker.role != wire.ROLE_PREFILL]
    found = _roomiest(decode or fitting, tokens)
    return None if found is None else found.life


def _least_work(workers: Sequence[Seen], tokens: int) -> Seen | None:
    def order(worker: Seen) -> tuple[bool, int, int]:
        return worker.avoided, worker.queued_tokens + tokens - worker.cached_tokens, worker.sequences

    return min((worker for worker in workers if worker.has_room and worker.takes_prompts), key=order, default=None)


def _roomiest(workers: Sequence[Seen], tokens: int) -> Seen | None:
    def order(worker: Seen) -> tuple[bool, bool, int, int, int]:
        lacks_room = worker.free_blocks * worker.block_tokens <= tokens - worker.cached_tokens
        return worker.avoided, lacks_room, worker.sequences, -worker.cached_tokens, -worker.free_blocks

    return min((worker for worker in workers if worker.has_room), key=order, default=None)
