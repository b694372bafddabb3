"""The stops of docs/concepts/request.md are in the order of a request's calls."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from types import FrameType
from typing import NamedTuple

from decant.client import Client
from decant.state.store import Store
from tests.build.test_request_page import STOPS
from tests.router.harness import PATIENCE, until
from tests.router.migration_harness import Harness, moving
from tests.router.test_traces import PROMPT, serving


class Stop(NamedTuple):
    module: str
    function: str


PAGE = [Stop("decant." + file.removeprefix("decant/")[:-3].replace("/", "."), name) for file, name in STOPS]


class CallRecorder:
    """Recorder of calls. A coroutine is recorded again each time that it continues."""

    def __init__(self) -> None:
        self.calls: list[Stop] = []
        self.is_on = False
        self._stops = frozenset(PAGE)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call":
            stop = Stop(frame.f_globals.get("__name__", ""), frame.f_code.co_qualname)
            if stop in self._stops:
                self.calls.append(stop)

    @contextmanager
    def profiling(self) -> Iterator[None]:
        before, before_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before_threads)


def follow(calls: Sequence[Stop], page: Sequence[Stop]) -> bool:
    """Return whether first calls are in the page's order; its last stop begins early and ends as the router's last."""
    *others, last = page
    instants = [calls.index(stop) for stop in others]
    in_router = [stop for stop in calls if stop.module.startswith("decant.router.")]
    return instants == sorted(instants) and in_router[-1] == last


async def streamed(harness: Harness, address: str, recorder: CallRecorder) -> str:
    def ask() -> str:
        with recorder.profiling(), Client(address) as client:
            return "".join(
                delta.text for delta in client.stream(PROMPT, max_tokens=12, ignore_eos=True, timeout=PATIENCE)
            )

    prefill, decode = (harness.workers[name].host for name in "pd")
    device, gate = harness.workers["p"].device, threading.Event()
    device.hold()
    device.let(1)  # of two chunks
    answer = asyncio.create_task(asyncio.to_thread(ask))
    await until(lambda: any(lease.is_opened for lease in prefill.sender.leases.all()))
    decode.loop.post(lambda _: gate.wait(PATIENCE))
    device.go_on()
    await until(lambda: any(each.stream.outputs[0].tokens for each in harness.core.requests.executions.open.values()))
    gate.set()
    return await answer


async def test_a_streamed_request_passes_the_stops_in_the_order_of_the_page(store: Store) -> None:
    recorder = CallRecorder()
    with recorder.profiling():
        # A sample of the load is a step of the engine too.
        without_samples = moving(store, decode="d", prefill="p", load_interval_s=PATIENCE)
        async with without_samples as harness, serving(harness.core) as address:
            recorder.is_on = True
            assert await streamed(harness, address, recorder)
            recorder.is_on = False
    calls = recorder.calls
    assert set(calls) == set(PAGE)
    assert follow(calls, PAGE), [stop.function for stop in dict.fromkeys(calls)]
    for one, other in combinations(range(len(PAGE)), 2):
        page = list(PAGE)
        page[one], page[other] = page[other], page[one]
        assert not follow(calls, page), f"no order of {PAGE[one]} and {PAGE[other]}"
