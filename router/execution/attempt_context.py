"""One request in the hands of its attempts."""

from __future__ import annotations

from dataclasses import dataclass, field

from decant.protos import worker_pb2 as wire
from decant.router.admission.wait_prediction import Wait
from decant.router.execution.token_stream import Course
from decant.router.execution.token_writer import Pen
from decant.router.placement.prefix_index import Prefix
from decant.router.workers.pool import Worker
from decant.state.ids import Life
from decant.state.owned import OwnedRequest


@dataclass(slots=True)
class Job:
    """What one request keeps from one attempt to the next."""

    course: Course
    owned: OwnedRequest
    pen: Pen
    avoid: set[Life] = field(default_factory=set)
    from_tokens: bool = False
    """A handoff failed, or tokens are written: no more prefill workers."""
    holder: Life | None = None
    """Of a request that was adopted: the decode worker where its attempt runs, if it still does."""
    layout: int = 0
    """Of those who wrote what an earlier owner has shown, where they give equal bits; 0: they may not."""
    wait: Wait | None = None
    """Until a worker begins with it for the first time; None for one that was adopted."""
    prefix: Prefix = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = Prefix(self.course.request.work)

    def run(self) -> wire.Run:
        """The present attempt, as workers are asked for it."""
        owned = self.owned
        return wire.Run(request=str(owned.key), epoch=owned.epoch, attempt=owned.attempt, digest=owned.digest)

    def compute_at(self, worker: Worker) -> None:
        """What is not written yet is computed there. Where more was shown than is written, the same has to come."""
        facts = worker.facts
        if self.course.is_behind and not (facts.equal_bits and facts.layout == self.layout):
            self.owned.record.certain_seq = self.course.doubt()

    def note(self, giver: Worker | None, taker: Worker | None, failure: wire.Failure | None = None) -> None:
        """Who runs the present attempt, into the record: for people, and for whoever adopts the request."""
        attempts = self.owned.record.attempts
        if not attempts or attempts[-1].attempt != self.owned.attempt:
            attempts.add(attempt=self.owned.attempt)
        noted = attempts[-1]
        if giver is not None:
            noted.prefill_worker.CopyFrom(giver.facts.peer)
        if taker is not None:
            noted.decode_worker.CopyFrom(taker.facts.peer)
        for worker in (giver, taker):  # who hand over have one layout
            if worker is not None:
                noted.layout = worker.facts.layout if worker.facts.equal_bits else 0
        if failure is not None:
            noted.failure.CopyFrom(failure)
