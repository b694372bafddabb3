from __future__ import annotations

from typing import Any

from decant.protos import worker_pb2 as wire
from decant.router.workers.subscription import MoveTest


class RunRecorder:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.draining = 0
        """Heartbeats in which the worker drained."""

    def on_scheduled(self, message: wire.Scheduled) -> None:
        self.events.append(message)

    def on_decode_started(self, message: wire.DecodeStarted) -> None:
        self.events.append(message)

    def on_run_status(self, status: wire.RunStatus) -> None:
        self.events.append(status)

    def on_offer(self, ticket: wire.Ticket) -> None:
        self.events.append(ticket)

    def on_crowded(self, count: int, is_worth: MoveTest) -> int:
        return 0

    def on_draining(self) -> None:
        self.draining += 1

    def on_prompt_logprobs(self, message: wire.PromptLogprobs) -> None:
        self.events.append(message)

    def on_ended(self, end: wire.OutputEnd, *, is_last: bool) -> None:
        self.events.append(end)

    def on_refused(self, refused: wire.Refused) -> None:
        self.events.append(refused)

    def on_failed(self, failed: wire.Failed) -> None:
        self.events.append(failed)

    def on_superseded(self, superseded: wire.Superseded) -> None:
        self.events.append(superseded)
