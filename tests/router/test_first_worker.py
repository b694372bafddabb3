"""Requests that wait for a first worker of their model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from decant.router.admission.first_worker import FirstWorkerQueue
from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import DeadlineExceeded, QueueFull, ServiceError, Unavailable
from tests.router import virtual_time
from tests.router.virtual_time import settle

NO_DEADLINE = Deadline()


class Scene:
    def __init__(self, limit_s: float = 300.0, queue_limit: int = 2, reason: Reason = Reason.NO_WORKER) -> None:
        self.served: set[str] = set()
        self.accepted = 0
        self.queue = FirstWorkerQueue(
            limit_s, queue_limit, self.served.__contains__, lambda model: Unavailable(reason, "none", retry_after=1.0)
        )

    def wait(self, model: str = "m", deadline: Deadline = NO_DEADLINE) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.queue.wait(model, 7, deadline, self._accept))

    def serve(self, model: str) -> None:
        self.served.add(model)
        self.queue.notify(model)

    async def _accept(self) -> None:
        self.accepted += 1


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(coroutine)


async def error_of(waiting: asyncio.Task[None]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await waiting
    return caught.value


def test_a_request_waits_until_a_worker_serves_its_model() -> None:
    async def go() -> None:
        scene = Scene()
        one, other = scene.wait("m"), scene.wait("n")
        await settle()
        assert scene.accepted == 2, "its client gets headers at once"
        assert [(each.model, each.prompt_tokens) for each in scene.queue] == [("m", 7), ("n", 7)]
        scene.queue.notify("m")  # a worker came that can't be used
        await settle()
        assert not one.done()
        scene.serve("m")
        await one
        assert not other.done()
        other.cancel()
        await asyncio.wait([other])
        assert not len(scene.queue)

    run(go())


def test_a_request_is_refused_when_no_worker_comes_in_time() -> None:
    async def go() -> None:
        scene, began = Scene(limit_s=300.0), asyncio.get_running_loop().time()
        error = await error_of(scene.wait())
        assert error.reason is Reason.NO_WORKER
        assert asyncio.get_running_loop().time() - began == pytest.approx(300.0)
        assert not len(scene.queue)

    run(go())


def test_the_deadline_of_a_request_also_ends_its_wait() -> None:
    async def go() -> None:
        scene = Scene(limit_s=300.0)
        assert isinstance(await error_of(scene.wait(deadline=Deadline.after(100.0))), DeadlineExceeded)

    run(go())


def test_only_so_many_requests_wait() -> None:
    async def go() -> None:
        scene = Scene(queue_limit=2)
        waiting = [scene.wait(), scene.wait("n")]
        await settle()
        assert isinstance(await error_of(scene.wait()), QueueFull)
        assert scene.accepted == 2, "a refusal comes without headers"
        scene.serve("m")
        scene.serve("n")
        await asyncio.gather(*waiting)

    run(go())


def test_a_draining_router_refuses_the_requests_that_wait() -> None:
    async def go() -> None:
        scene = Scene()
        waiting = scene.wait()
        await settle()
        scene.queue.close()
        assert (await error_of(waiting)).reason is Reason.DRAINING

    run(go())


def test_nothing_waits_without_a_limit_or_for_workers_that_do_not_fit() -> None:
    assert Scene().queue.may_wait("m")
    assert not Scene(limit_s=0.0).queue.may_wait("m")
    assert not Scene(reason=Reason.TOKENIZER_MISMATCH).queue.may_wait("m")
    served = Scene()
    served.served.add("m")
    assert not served.queue.may_wait("m")
