from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

import decant
from decant.runtime.backoff import Backoff
from tests.decant.scripted import Break, Script, with_a_tail

LOST = grpc.StatusCode.UNAVAILABLE

SHORT_BACKOFF = Backoff(first_s=0.001, longest_s=0.01)
Client = partial(decant.Client, backoff=SHORT_BACKOFF)
AsyncClient = partial(decant.AsyncClient, backoff=SHORT_BACKOFF)


@dataclass
class Two:
    """Two routers of one service, whose streams break in turn."""

    address: str
    routers: list[Script]

    def reset(self, breaks: list[Break]) -> None:
        shared = deque(breaks)
        known: dict[str, Any] = {}
        for script in self.routers:
            script.breaks, script.known, script.answering = shared, known, with_a_tail
            script.refusal = None
            for log in (script.requests, script.resumed, script.cancelled):
                log.clear()

    @property
    def num_requests(self) -> int:
        return sum(len(script.requests) for script in self.routers)

    @property
    def resumed(self) -> list[int]:
        return sorted(request.after_seq for script in self.routers for request in script.resumed)


def is_whole(stream: Any, deltas: list[decant.Delta]) -> None:
    assert [delta.text for delta in deltas] == ["a", "b", "c", "!"]
    (output,) = stream.outputs
    assert (stream.text, output.token_ids, stream.seq) == ("abc!", (97, 98, 99), 3)
    assert stream.finished == decant.Finished(decant.FinishReason.STOP, 2)
    assert stream.usage == decant.Usage(3, 3, 6)


class SkewedClock:
    """The clock of clients' retries, which a test puts forward."""

    def __init__(self) -> None:
        self.skew = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skew

    def of(self, client: Any) -> Any:
        client._routers.selector.clock = self
        return client
