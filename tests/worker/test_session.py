from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest
from structlog.testing import capture_logs

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, from_call
from decant.runtime.protocol import PROTOCOL
from decant.worker.decode.session import RouterSession, SessionLimits
from tests.worker.decode_harness import Node, make_run, make_work, owned, routed, run_alone
from tests.worker.session_client import Router
from tests.worker.waiting import advance, eventually


async def refusal(node: Node, *words: wire.RouterMessage) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(node.address) as channel:
        call = services.DecodeStub(channel).Session(timeout=20)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for word in words:
                await call.write(word)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    return caught.value


def hello(node: Node, **changed: int) -> wire.RouterMessage:
    router = wire.Peer(id="router", incarnation=1, protocol=changed.get("protocol", PROTOCOL))
    worker = wire.Peer(id=node.peer.id, incarnation=changed.get("incarnation", node.peer.incarnation))
    return wire.RouterMessage(hello=wire.Hello(router=router, worker=worker))


@pytest.mark.rule(
    "protocol-versions-neighbours", "runtime/protocol.py:is_compatible", "worker/decode/service.py:DecodeService._check"
)
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"incarnation": 8}, Reason.WRONG_PEER),
        ({"protocol": 0}, Reason.WRONG_PROTOCOL),
        ({"protocol": PROTOCOL - 2}, Reason.WRONG_PROTOCOL),
        ({"protocol": PROTOCOL + 2}, Reason.WRONG_PROTOCOL),
    ],
)
async def test_another_incarnation_and_distant_protocols_are_refused(changed: dict[str, int], reason: Reason) -> None:
    async with Node("d") as node:
        error = await refusal(node, hello(node, **changed))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert from_call(error).reason is reason


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL, PROTOCOL + 1])
async def test_routers_of_neighbouring_protocol_versions_are_served(protocol: int) -> None:
    run, work = make_run(), make_work(8, 20)
    async with Node("d") as node:
        router = Router(node)
        router.peer.protocol = protocol
        await router.open()
        await router.start(run, work)
        await router.until_message(run, "ended")
        assert router.record_of(run).text(8) == run_alone(work)
        await router.leave()


async def test_a_session_begins_with_hello_and_has_one() -> None:
    async with Node("d") as node:
        assert (
            await refusal(node, wire.RouterMessage(heartbeat=wire.Heartbeat()))
        ).code() is grpc.StatusCode.INVALID_ARGUMENT
        twice = await refusal(node, hello(node), hello(node))
        assert twice.code() is grpc.StatusCode.INVALID_ARGUMENT
        await eventually(lambda: node.decode.sessions == 0)


async def test_a_call_without_a_hello_ends_after_its_time() -> None:
    async with Node("d", session_limits=SessionLimits(hello_s=0.1)) as node:
        error = await refusal(node)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "within 0.1 s" in str(error.details())


UNKNOWN = b"\x9a\x06\x00"
"""Field 99, which no message of this build has."""


@pytest.mark.rule(
    "unknown-messages-ignored",
    "worker/decode/service.py:DecodeService._handle",
    "runtime/connections/peer.py:UnknownMessages.ignore",
)
async def test_messages_of_an_unknown_kind_are_ignored_and_logged_once() -> None:
    run, work = make_run(), make_work(8, 20)
    with capture_logs() as logs:
        async with routed() as (node, router):
            await router.write(wire.RouterMessage.FromString(UNKNOWN))
            await router.start(run, work)
            await router.write(wire.RouterMessage.FromString(UNKNOWN))
            await router.until_message(run, "ended")
            assert router.record_of(run).text(8) == run_alone(work)
            await eventually(lambda: node.decode._sessions["router"].unknown.count == 2)
            await router.forget(run)
    assert [line["event"] for line in logs].count("messages of an unknown kind are ignored") == 1


async def test_the_welcome_identifies_the_worker() -> None:
    async with routed() as (node, router):
        welcome = router.welcome
        assert welcome is not None
        assert (welcome.worker, welcome.role, welcome.model) == (node.peer, wire.ROLE_DECODE, "m")
        assert welcome.layout_hash == node.host.layout_hash
        assert node.decode.sessions == 1


@pytest.mark.rule(
    "newer-session-gets-runs",
    "worker/decode/service.py:DecodeService._open_session",
    "worker/decode/service.py:DecodeService._welcome",
)
async def test_a_newer_session_ends_the_older_and_gets_the_runs_that_it_names() -> None:
    named, unnamed, ended = make_run("t/named"), make_run("t/unnamed"), make_run("t/ended")
    works = {run.request: make_work(8, 200, seed=n) for n, run in enumerate((named, unnamed))}
    async with Node("d", lease_ms=60_000) as node:
        older, newer = Router(node), Router(node)
        await older.open()
        await older.start(ended, make_work(4, 2))
        await older.until_message(ended, "ended")
        node.device.seconds = 0.02
        for run in (named, unnamed):
            await older.start(run, works[run.request])
            await older.until_tokens(run, 3)
        welcome = await newer.open(owned(named, 10), owned(make_run("t/gone"), 5))
        await older.until(lambda: older.closed)
        assert older.error is not None
        assert older.error.code() is grpc.StatusCode.ABORTED
        assert [held.run.request for held in welcome.runs] == ["t/named"]
        assert [run.request for run in welcome.unknown_runs] == ["t/gone"]
        assert {run.request for run in welcome.orphans} == {"t/unnamed", "t/ended"}
        assert (node.decode.orphans, node.decode.ended_runs, node.decode.sessions) == (1, 1, 1)
        advance(60)
        node.device.seconds = 0.0
        await newer.until_message(named, "ended")
        assert newer.record_of(named).text(8) == run_alone(works["t/named"])[2:]
        await eventually(lambda: [run.request for run, *_ in node.decode.runs()] == ["t/named"])
        await newer.leave()
        await older.leave()
        await node.audit()


async def test_tokens_generated_without_a_session_are_sent_to_the_next() -> None:
    run, work = make_run(), make_work(8, 20, logprobs=1, prompt_logprobs=0)
    async with routed() as (node, router):
        node.device.seconds = 0.02
        await router.start(run, work)
        await router.until_tokens(run, 2)
        await router.leave()
        have = max(router.record_of(run).tokens) + 1
        node.device.seconds = 0.0
        await eventually(lambda: node.decode.ended_runs == 1)
        welcome = await router.open(owned(run, have))
        assert welcome.runs[0].phase == wire.RunStatus.PHASE_ENDED
        assert welcome.runs[0].ended[0].end_position == 28
        await router.until_tokens(run, 20)
        assert router.record_of(run).text(8) == run_alone(work)
        assert len(router.record_of(run).logprobs) == 20
        await router.forget(run)
        await eventually(lambda: node.decode.ended_runs == 0)


async def test_an_adopted_run_continues_under_its_new_owner() -> None:
    run, work = make_run(), make_work(8, 200)
    async with Node("d") as node, Router(node, "old") as old, Router(node, "new") as new:
        node.device.seconds = 0.02
        await old.start(run, work)
        await old.until_tokens(run, 3)
        adopted = make_run(epoch=2)
        await new.send(adopt=wire.Adopt(run=adopted, resume=[wire.ResumePosition(output=0, position=9)]))
        held = await new.until_message(run, "run_status")
        assert (held.run.epoch, held.slots[0].position) == (2, 9)
        assert (await old.until_message(run, "superseded")).epoch == 2
        await old.forget(run)  # the run is no longer this router's
        await old.cancel(run)
        await old.until(lambda: old.record_of(run).kinds.count("superseded") == 3)
        node.device.seconds = 0.0
        await new.until_message(run, "ended")
        assert new.record_of(run).text(8) == run_alone(work)[1:]
        await new.send(adopt=wire.Adopt(run=make_run("t/other"), resume=[]))
        assert (await new.until_message(make_run("t/other"), "failed")).failure.cause == wire.CAUSE_UNKNOWN_RUN


async def test_a_hello_of_an_earlier_owner_is_superseded() -> None:
    run, work = make_run(), make_work(8, 10)
    async with Node("d") as node, Router(node, "new") as new:
        await new.start(make_run(epoch=2), work)
        await new.until_message(run, "ended")
        old = Router(node, "old")
        welcome = await old.open(owned(run, 8))
        assert not welcome.runs
        assert not welcome.unknown_runs
        assert (await old.until_message(run, "superseded")).epoch == 2
        await old.leave()


@pytest.mark.slow
async def test_heartbeats_continue_during_a_long_step_and_report_its_age() -> None:
    run = make_run()
    async with routed() as (node, router):
        node.device.seconds = 10.0
        await router.start(run, make_work(4, 1))

        def ages() -> list[int]:
            return [heartbeat.step_age_ms for heartbeat in router.heartbeats if heartbeat.HasField("step_age_ms")]

        await router.until(lambda: len(ages()) >= 4)
        assert ages() == sorted(ages())
        node.device.seconds = 0.0
        await router.until_message(run, "ended")
        assert router.heartbeats[0].load.total_blocks == 128


@pytest.mark.slow
async def test_a_silent_router_is_suspect_and_nothing_else() -> None:
    run, work = make_run(), make_work(8, 40)
    async with Node("d") as node:
        router = Router(node)
        router.sends_heartbeats = False
        with capture_logs() as logs:
            await router.open()
            node.device.seconds = 0.05
            await router.start(run, work)
            await eventually(lambda: any(line["event"] == "router is silent" for line in logs))
            await router.until_message(run, "ended")
            await router.send(heartbeat=wire.Heartbeat())
            await eventually(lambda: any(line["event"] == "router is no longer silent" for line in logs))
        assert router.record_of(run).text(8) == run_alone(work)
        await router.leave()


async def test_a_router_with_too_many_unread_messages_loses_its_session() -> None:
    limits = SessionLimits(max_unread=5, last_write_s=0.05)
    session = RouterSession(wire.Peer(id="r"), lambda _: wire.Heartbeat(), limits)
    reading, stuck = asyncio.Event(), asyncio.Event()

    async def requests() -> AsyncIterator[wire.RouterMessage]:
        await reading.wait()
        yield wire.RouterMessage()

    async def write(_: wire.WorkerMessage) -> None:
        await stuck.wait()

    serving = asyncio.create_task(session.serve(requests(), write, lambda *_: None))
    for _ in range(7):
        await asyncio.sleep(0)
        session.send(wire.WorkerMessage())
    with pytest.raises(Aborted):
        await serving
    session.send(wire.WorkerMessage())  # into the void


@pytest.mark.rule("unread-messages-end-session", "worker/decode/session.py:RouterSession._send_heartbeats")
@pytest.mark.slow
@pytest.mark.parametrize("reads", [False, True])
async def test_a_router_loses_its_session_by_the_age_of_its_oldest_unread_message(
    reads: bool,
) -> None:
    limits = SessionLimits(heartbeat_s=0.01, max_unread_s=0.1, last_write_s=0.05)
    session = RouterSession(wire.Peer(id="r"), lambda _: wire.Heartbeat(), limits)
    written, never = asyncio.Event(), asyncio.Event()
    count = 0

    async def requests() -> AsyncIterator[wire.RouterMessage]:
        await never.wait()
        yield wire.RouterMessage()

    async def write(_: wire.WorkerMessage) -> None:
        nonlocal count
        count += 1
        if not reads:
            await never.wait()
        elif count == 50:
            written.set()

    serving = asyncio.create_task(session.serve(requests(), write, lambda *_: None))
    if reads:
        async with asyncio.timeout(60):
            await written.wait()
        session.finish()
        await serving
    else:
        with pytest.raises(Aborted):
            await asyncio.wait_for(serving, 60)
        assert count == 1


@pytest.mark.slow
async def test_a_router_that_reads_nothing_over_grpc_loses_its_session() -> None:
    run, work, limits = make_run(), make_work(8, 480), SessionLimits(max_unread=50)
    async with (
        Node("d", lease_ms=600_000, session_limits=limits) as node,
        grpc.aio.insecure_channel(node.address) as channel,
    ):
        call = services.DecodeStub(channel).Session()
        await call.write(hello(node))
        await call.write(wire.RouterMessage(start=wire.Start(run=run, engine_request=work)))
        await eventually(lambda: node.decode.ended_runs == 1)
        for _ in range(20_000):
            if not node.decode.sessions:
                break
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it ends during a write
                await call.write(
                    wire.RouterMessage(resend=wire.Resend(run=run, resume=wire.ResumePosition(output=0, position=8)))
                )
        await eventually(lambda: node.decode.sessions == 0)
        advance(node.host.lease_s)
        await eventually(lambda: not list(node.decode.runs()))
        call.cancel()


# -- drain and crash --------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_drain_finishes_runs_and_refuses_new_ones() -> None:
    run, late, work = make_run(), make_run("t/late"), make_work(8, 40)
    async with routed() as (node, router):
        node.device.seconds = 0.02
        await router.start(run, work)
        await router.until_tokens(run, 1)
        draining = asyncio.create_task(node.decode.drain())
        await eventually(lambda: node.host.draining)
        await router.start(late, work)
        assert (await router.until_message(late, "refused")).failure.cause == wire.CAUSE_DRAINING
        await router.until_message(run, "ended")
        assert router.record_of(run).text(8) == run_alone(work)
        assert not draining.done()  # its tokens may still be asked for
        await router.forget(run)
        async with asyncio.timeout(20):
            await draining
        await router.until(lambda: router.closed)
        assert router.error is None
        assert (await refusal(node, hello(node))).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_crash_of_the_engine_fails_every_run() -> None:
    runs = [make_run(f"t/{n}") for n in range(3)]
    async with Node("p", lease_ms=60_000) as sender, routed(running=1, budget=4) as (node, router):
        node.device.seconds = 0.02
        work = make_work(40, 400)
        await router.start(runs[0], work)
        await router.until_tokens(runs[0], 1)
        await router.start(runs[1], work)
        await router.start(runs[2], work, await sender.offer(runs[2], work))
        await eventually(lambda: len(list(node.decode.runs())) == 3)  # later it would refuse them
        node.device.broken = True
        for run in runs:
            assert (await router.until_message(run, "failed")).failure.cause == wire.CAUSE_ENGINE
        await router.start(make_run("t/late"), work)
        assert (await router.until_message(make_run("t/late"), "refused")).failure.cause == wire.CAUSE_ENGINE
        assert not list(node.decode.runs())
        assert node.host.num_waiting() == 0
        advance(60)
        await sender.audit()
