from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from structlog.testing import capture_logs

from decant.protos import worker_pb2 as wire
from decant.router.timings import WorkerTimings
from decant.router.workers.session import WorkerSession
from decant.runtime.backoff import Backoff
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.peer import new_peer
from decant.runtime.connections.tls import PeerTls
from tests.router.fake_script import answer
from tests.router.fake_worker import fleet
from tests.router.harness import PATIENCE, until
from tests.router.session_harness import PROMPT, D, Watcher, make_run, session


async def test_a_run_is_reported_in_order_written_once_and_forgotten() -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, _):
        run = make_run()
        opened.start(run.following)
        await until(lambda: wire.OutputEnd in run.kinds)
        assert run.kinds == [wire.Scheduled, wire.DecodeStarted, wire.OutputEnd]
        assert run.stream.outputs[0].tokens == answer(PROMPT, 5)
        await until(lambda: not worker.runs)
        assert not opened.is_busy


@pytest.mark.rule(
    "unknown-messages-ignored",
    "router/workers/session.py:WorkerSession.on_message",
    "runtime/connections/peer.py:UnknownMessages.ignore",
)
async def test_messages_of_an_unknown_kind_are_ignored_and_logged_once() -> None:
    unknown = wire.WorkerMessage.FromString(b"\x9a\x06\x00")  # field 99
    with capture_logs() as logs:
        async with fleet(D) as (worker,), session(worker) as (opened, _):
            worker.script.pause_at = 2
            run = make_run()
            opened.start(run.following)
            await until(lambda: len(run.stream.outputs[0].tokens) == 2)
            worker._send(unknown)
            worker._send(unknown)
            worker.go.set()
            await until(lambda: wire.OutputEnd in run.kinds)
            assert run.stream.outputs[0].tokens == answer(PROMPT, 5)
            assert opened.unknown.count == 2
            assert len(worker.hellos) == 1
    assert [line["event"] for line in logs].count("messages of an unknown kind are ignored") == 1


async def test_a_session_that_can_not_be_opened_is_logged_once(tmp_path: Path) -> None:
    timings = WorkerTimings(session_backoff=Backoff(0.001, 0.001))
    attempts = iter(range(5))
    with capture_logs() as logs:
        async with open_channel(f"unix:{tmp_path}/nothing", PeerTls()) as channel, asyncio.timeout(PATIENCE):
            closed = WorkerSession(new_peer("router"), new_peer("d"), channel, Watcher(), timings)
            await closed.run(lambda: next(attempts, None) is not None)
    assert [(line["event"], line["worker"]) for line in logs] == [("session can't be opened", "d")]


@pytest.mark.parametrize("error", [RuntimeError("the handler is closed"), grpc.aio.InternalError("no batch")])
async def test_whatever_grpc_raises_breaks_one_connection_of_a_session(error: Exception) -> None:
    timings = WorkerTimings(session_backoff=Backoff(0.001, 0.001))
    attempts = iter(range(5))
    calls = []

    def begin() -> Mock:
        calls.append(Mock(write=AsyncMock(side_effect=error)))
        return calls[-1]

    async with open_channel("127.0.0.1:1", PeerTls()) as channel, asyncio.timeout(PATIENCE):
        broken = WorkerSession(new_peer("router"), new_peer("d"), channel, Watcher(), timings)
        broken._stub = Mock(Session=begin)
        await broken.run(lambda: next(attempts, None) is not None)
    assert len(calls) == 5


async def test_runs_that_ended_are_forgotten_together() -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, _):
        runs = [make_run(attempt=n) for n in range(20)]
        counts: list[int] = []
        forget = worker.changed
        for run in runs:
            opened.start(run.following)
        while len(worker.forgotten) < 20:
            forget.clear()
            async with asyncio.timeout(PATIENCE):
                await forget.wait()
            if len(worker.forgotten) not in counts:
                counts.append(len(worker.forgotten))
        assert len(counts) < 10, "few messages for many runs"


async def test_runs_of_an_earlier_session_are_cancelled() -> None:
    router = new_peer("router")
    async with fleet(D) as (worker,):
        worker.script.pause_at = 2
        async with session(worker, router) as (opened, _):
            run = make_run()
            opened.start(run.following)
            await until(lambda: len(run.stream.outputs[0].tokens) == 2)
        assert isinstance(run.events[-1], wire.Failed)
        await until(lambda: not worker._outs)  # the next session comes over another connection
        async with session(worker, router):
            await until(lambda: worker.cancels)
            assert worker.cancels[0].run == run.following.run
            await until(lambda: not worker.runs)


async def test_a_start_that_never_arrived_is_sent_again_and_one_that_did_has_failed() -> None:
    async with fleet(D) as (worker,), session(worker, reconnect_s=10 * PATIENCE) as (opened, _):
        worker.script.pause_at = 2
        known = make_run(attempt=1)
        opened.start(known.following)
        await until(lambda: len(known.stream.outputs[0].tokens) == 2)
        worker.break_session()
        await until(lambda: not opened.is_open)
        unanswered = make_run(attempt=2)
        opened.start(unanswered.following)
        worker.runs.clear()  # it has forgotten what it had
        await until(lambda: len(unanswered.stream.outputs[0].tokens) == 2)
        await until(lambda: known.events and isinstance(known.events[-1], wire.Failed))
        assert known.events[-1].failure.cause == wire.CAUSE_UNKNOWN_RUN
        opened.close_run(
            unanswered.following, wire.Cancel(run=unanswered.following.run, reason=wire.Cancel.REASON_CLIENT)
        )


async def test_a_start_before_the_welcome_is_sent_after_it() -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, _):
        worker.script.welcome_pause = True
        worker.break_session()
        await until(lambda: len(worker.hellos) == 2)
        run = make_run()
        opened.start(run.following)
        worker.go.set()
        await until(lambda: wire.OutputEnd in run.kinds)
        assert run.stream.outputs[0].tokens == answer(PROMPT, 5)


@pytest.mark.rule(
    "cancel-in-next-session", "router/workers/outgoing.py:Outgoing.cancel", "router/workers/outgoing.py:Outgoing.open"
)
@pytest.mark.parametrize("is_greeted", [False, True], ids=["before hello", "between hello and welcome"])
async def test_a_cancel_while_no_session_is_open_reaches_the_worker_with_the_next_one(is_greeted: bool) -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, _):
        worker.script.pause_at = 2
        run = make_run()
        opened.start(run.following)
        await until(lambda: len(run.stream.outputs[0].tokens) == 2)
        worker.script.welcome_pause = is_greeted
        worker.script.refuse_sessions = not is_greeted
        worker.break_session()
        await until(lambda: len(worker.hellos) == 2 if is_greeted else not opened.is_open)
        cancel = wire.Cancel(run=run.following.run, reason=wire.Cancel.REASON_STOP_STRING, end_position=4)
        opened.close_run(run.following, cancel)
        worker.script.refuse_sessions = False
        worker.go.set()
        await until(lambda: worker.cancels)
        assert worker.cancels == [cancel]
        await until(lambda: not worker.runs)  # forgotten too
        assert not opened.is_busy


@pytest.mark.rule(
    "cancel-in-next-session",
    "router/workers/session_runs.py:SessionRuns.fail_all",
    "router/workers/outgoing.py:Outgoing.cancel",
)
async def test_runs_given_up_for_a_stuck_step_are_cancelled_at_the_worker() -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, _):
        worker.script.pause_at = 2
        run = make_run(max_tokens=50)
        opened.start(run.following)
        await until(lambda: len(run.stream.outputs[0].tokens) == 2)
        worker.script.stuck_ms = 60_000
        await until(lambda: wire.Failed in run.kinds)
        await until(lambda: worker.cancels)
        assert worker.cancels[0].run == run.following.run
        worker.script.stuck_ms = None  # the step ends
        worker.go.set()
        await until(lambda: not worker.runs)
        assert len(run.stream.outputs[0].tokens) == 2


async def test_runs_given_up_while_the_session_was_down_are_cancelled_when_it_is_back() -> None:
    async with fleet(D) as (worker,), session(worker, reconnect_s=0.01) as (opened, _):
        worker.script.pause_at = 2
        run = make_run(max_tokens=50)
        opened.start(run.following)
        await until(lambda: len(run.stream.outputs[0].tokens) == 2)
        worker.script.welcome_pause = True
        worker.break_session()
        await until(lambda: wire.Failed in run.kinds)
        worker.go.set()
        await until(lambda: not worker.runs)
        assert [cancel.run for cancel in worker.cancels] == [run.following.run]


async def test_after_a_break_tokens_go_on_from_where_they_were() -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, _):
        worker.script.pause_at = 3
        run = make_run(max_tokens=7)
        opened.start(run.following)
        await until(lambda: len(run.stream.outputs[0].tokens) == 3)
        worker.break_session()
        worker.go.set()
        await until(lambda: wire.OutputEnd in run.kinds)
        assert run.stream.outputs[0].tokens == answer(PROMPT, 7)
        assert worker.hellos[-1].owned[0].resume[0].position == 6


async def test_the_welcome_reports_an_end_during_a_break() -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, _):
        worker.script.pause_at = 3
        run = make_run()
        opened.start(run.following)
        await until(lambda: len(run.stream.outputs[0].tokens) == 3)
        worker.break_session()
        await until(lambda: worker._out is None)
        worker.go.set()
        await until(lambda: all(each.end for each in worker.runs.values()))
        await until(lambda: wire.OutputEnd in run.kinds)
        assert run.stream.outputs[0].tokens == answer(PROMPT, 5)
        assert run.kinds.count(wire.OutputEnd) == 1


async def test_a_session_that_does_not_reconnect_loses_its_runs_once() -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, _):
        worker.script.pause_at = 2
        run = make_run()
        opened.start(run.following)
        await until(lambda: len(run.stream.outputs[0].tokens) == 2)
        await worker.stop()
        await until(lambda: wire.Failed in run.kinds)
        assert run.events[-1].failure.cause == wire.CAUSE_PEER_LOST
        assert not opened.is_busy
        assert run.kinds.count(wire.Failed) == 1


@pytest.mark.rule(
    "time-to-reconnect",
    "router/workers/session.py:WorkerSession._start_reconnect_grace",
    "router/workers/session.py:WorkerSession._run_connection",
    "router/workers/stream_io.py:_broken",
)
@pytest.mark.parametrize("is_restarting", [False, True], ids=["port refuses", "another process starts"])
async def test_the_runs_of_a_killed_worker_are_lost_at_once(is_restarting: bool) -> None:
    async with fleet(D) as (worker,), session(worker, reconnect_s=10 * PATIENCE) as (opened, _):
        worker.script.pause_at = 2
        run = make_run()
        opened.start(run.following)
        await until(lambda: len(run.stream.outputs[0].tokens) == 2)
        if is_restarting:
            worker.script.is_starting = True
            worker.break_session()
        else:
            await worker.stop()
        await until(lambda: wire.Failed in run.kinds)
        assert run.events[-1].failure.cause == wire.CAUSE_PEER_LOST
        assert not opened.is_busy


async def test_the_runs_of_a_worker_whose_session_broke_wait_while_it_is_reached() -> None:
    async with fleet(D) as (worker,), session(worker, reconnect_s=10 * PATIENCE) as (opened, _):
        worker.script.pause_at = 2
        run = make_run()
        opened.start(run.following)
        await until(lambda: len(run.stream.outputs[0].tokens) == 2)
        worker.script.refuse_sessions = True  # a process answers there
        worker.break_session()
        await until(lambda: not opened.is_open)
        assert opened.is_busy
        worker.script.refuse_sessions = False
        worker.go.set()
        await until(lambda: wire.OutputEnd in run.kinds)
        assert run.stream.outputs[0].tokens == answer(PROMPT, 5)


async def test_another_incarnation_ends_the_session() -> None:
    async with fleet(D) as (worker,):
        known = wire.Peer()
        known.CopyFrom(worker.registration.peer)
        worker.registration.peer.incarnation += 1
        watcher = Watcher()
        async with open_channel(worker.registration.address, PeerTls()) as channel:
            opened = WorkerSession(new_peer("router"), known, channel, watcher)
            run = make_run()
            opened.start(run.following)
            async with asyncio.timeout(PATIENCE):
                await opened.run(lambda: True)
        assert opened.is_final
        assert run.kinds == [wire.Failed]


@pytest.mark.rule(
    "silent-worker",
    "router/workers/liveness.py:Liveness.is_healthy",
    "router/workers/session.py:WorkerSession._send_heartbeats",
)
@pytest.mark.slow
async def test_silence_is_suspect_and_then_a_break() -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, _):
        assert not opened.is_suspect
        worker.script.silent = True
        await until(lambda: opened.is_suspect)
        assert opened.is_open
        await until(lambda: not opened.is_open)
        worker.script.silent = False
        await until(lambda: opened.is_open)
        assert not opened.is_suspect


@pytest.mark.rule(
    "stuck-step", "router/workers/liveness.py:StuckStepDetector", "router/workers/session.py:WorkerSession.on_message"
)
async def test_a_stuck_step_is_far_older_than_others_of_its_size() -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, watcher):
        worker.script.stuck_ms = 5_000
        await until(lambda: opened.is_stuck)
        worker.script.stuck_ms = 1_900
        await until(lambda: not opened.is_stuck)
        assert opened._liveness is not None
        opened._liveness.step.update(wire.Heartbeat(step_age_ms=30_000, longest_step_ms=4_000))
        assert not opened.is_stuck, "its like take as long"
        assert watcher.loads > 0


async def test_renewals_go_to_the_sender_with_the_next_heartbeat() -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, _):
        opened.unclaimed.add(b"unclaimed")
        opened.renewed.add(b"renewed")
        await until(lambda: worker.renewed.count(b"unclaimed") >= 2)
        assert worker.renewed.count(b"renewed") == 1


async def test_a_malformed_frame_breaks_the_session_and_its_runs() -> None:
    async with fleet(D) as (worker,), session(worker) as (opened, _):
        worker.script.pause_at = 1
        run = make_run()
        opened.start(run.following)
        await until(lambda: len(run.stream.outputs[0].tokens) == 1)
        worker._send(wire.WorkerMessage(frame=wire.Frame(slots=b"\0\0\0\0", positions=b"", tokens=b"")))
        await until(lambda: wire.Failed in run.kinds)
        await until(lambda: opened.is_open)
