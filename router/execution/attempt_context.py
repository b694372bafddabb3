"""One request in the hands of its attempts."""

from __future__ import annotations

from dataclasses import dataclass, field

from decant.protos import worker_pb2 as wire
from decant.router.admission.wait_prediction import Wait
from decant.router.execution.token_stream import TokenStream
from decant.router.execution.token_writer import TokenWriter
from decant.router.placement.prefix_index import PromptBlocks
from decant.router.workers.pool import WorkerHandle
from decant.state.ids import Incarnation
from decant.state.owned import OwnedRequest


@dataclass(slots=True)
class AttemptContext:
    """What one request keeps from one attempt to the next."""

    course: TokenStream
    owned: OwnedRequest
    pen: TokenWriter
    avoid: set[Incarnation] = field(default_factory=set)
    from_tokens: bool = False
    """A handoff failed, or tokens are written: no more prefill workers."""
    holder: Incarnation | None = None
    """Of a request that was adopted: the decode worker where its attempt runs, if it still does."""
    layout: int = 0
    """Of those who wrote what an earlier owner has shown, where they give equal bits; 0: they may not."""
    wait: Wait | None = None
    """Until a worker begins with it for the first time; None for one that was adopted."""
    prefix: PromptBlocks = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = PromptBlocks(self.course.request.engine_request)

    def run(self) -> wire.Run:
        """The present attempt, as workers are asked for it."""
        owned = self.owned
        return wire.Run(request=str(owned.key), epoch=owned.epoch, attempt=owned.attempt, digest=owned.digest)

    def compute_at(self, worker: WorkerHandle) -> None:
        """What is not written yet is computed there. Where more was shown than is written, the same has to come."""
        facts = worker.facts
        if self.course.is_behind and not (facts.equal_bits and facts.layout == self.layout):
            self.owned.record.certain_seq = self.course.doubt()

    def note(self, giver: WorkerHandle | None, taker: WorkerHandle | None, failure: wire.Failure | None = None) -> None:
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
