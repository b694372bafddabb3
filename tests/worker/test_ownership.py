from __future__ import annotations

import pytest

from decant.protos import worker_pb2 as wire
from tests.worker.decode_harness import Node, make_run, make_work, owned, run_alone
from tests.worker.session_client import Router
from tests.worker.waiting import eventually


@pytest.mark.rule(
    "lower-epochs-refused", "worker/epochs.py:Epochs.hold", "worker/decode/service.py:DecodeService._refusal"
)
async def test_a_former_owner_cannot_affect_a_live_run_however_old_the_adoption_is() -> None:
    run, adopted, work = make_run(), make_run(epoch=2), make_work(8, 200)
    async with Node("d") as node, Router(node, "old") as old, Router(node, "new") as new:
        node.host.epochs._keep_s = 0.0  # all that is not live is forgotten at once
        node.device.seconds = 0.02
        await old.start(run, work)
        await old.until_tokens(run, 3)
        await new.send(adopt=wire.Adopt(run=adopted, resume=[wire.ResumePosition(output=0, position=8)]))
        await new.until_message(adopted, "run_status")
        await old.cancel(run)
        await old.forget(run)
        await old.until(lambda: old.record_of(run).kinds.count("superseded") == 3)
        node.device.seconds = 0.0
        await new.until_message(adopted, "ended")
        assert new.record_of(adopted).text(8) == run_alone(work)
        assert set(new.record_of(adopted).kinds) <= {"run_status", "decode_started", "ended"}


@pytest.mark.rule("orphan-cancelled-after-lease", "worker/decode/ownership.py:RunOwnership.orphans_of")
async def test_runs_of_an_earlier_incarnation_of_a_router_continue_until_they_are_adopted() -> None:
    """The new hello lists none of them: the router has yet to read what it can adopt."""
    run, adopted, work = make_run(), make_run(epoch=2), make_work(8, 200)
    async with Node("d") as node:
        node.device.seconds = 0.02
        old, restarted = Router(node, "router", 1), Router(node, "router", 2)
        await old.open()
        await old.start(run, work)
        await old.until_tokens(run, 3)
        await old.leave()
        welcome = await restarted.open()
        assert not welcome.orphans
        assert node.decode.orphans == 1
        await restarted.send(adopt=wire.Adopt(run=adopted, resume=[wire.ResumePosition(output=0, position=8)]))
        await restarted.until_message(adopted, "run_status")
        node.device.seconds = 0.0
        await restarted.until_message(adopted, "ended")
        assert restarted.record_of(adopted).text(8) == run_alone(work)
        await restarted.forget(adopted)
        await restarted.leave()


@pytest.mark.slow
async def test_a_worker_names_all_routers_with_a_live_session_when_that_changes() -> None:
    def names(router: Router) -> list[set[str]]:
        return [{peer.id for peer in heartbeat.routers} for heartbeat in router.heartbeats if heartbeat.routers]

    async with Node("d") as node, Router(node, "one") as one:
        await one.until(lambda: names(one) == [{"one"}])
        silent = Router(node, "silent")
        silent.sends_heartbeats = False
        await silent.open()
        await one.until(lambda: names(one)[-1] == {"one", "silent"})
        await one.until(lambda: names(one)[-1] == {"one"})
        assert node.decode.sessions == 2, "it has sent nothing for too long, and may still come back"
        await silent.send(heartbeat=wire.Heartbeat())
        await one.until(lambda: names(one)[-1] == {"one", "silent"})
        await silent.leave()
        await one.until(lambda: names(one)[-1] == {"one"})
        assert len(names(one)) == 5, "sent when it changed, not with each heartbeat"


def other(run: wire.Run) -> wire.Run:
    return wire.Run(request=run.request, epoch=run.epoch, attempt=run.attempt, digest=b"b" * 32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["start", "start in a later epoch", "adopt", "hello"])
async def test_a_run_is_not_handed_to_a_request_with_the_same_id_and_another_payload(kind: str) -> None:
    run, work = make_run(), make_work(8, 25, seed=1)
    run.digest = b"a" * 32
    async with Node("d") as node, Router(node, "one") as one:
        node.device.seconds = 0.02
        await one.start(run, work)
        await one.until_tokens(run, 3)
        two, stranger = Router(node, "two"), other(run)
        if kind == "hello":
            welcome = await two.open(owned(stranger, 8))
            assert not welcome.runs
            assert not welcome.unknown_runs
        else:
            await two.open()
        if kind.startswith("start"):
            stranger.epoch += kind != "start"
            await two.start(stranger, make_work(8, 25, seed=2))
        elif kind == "adopt":
            stranger.epoch = 2
            await two.send(adopt=wire.Adopt(run=stranger, resume=[wire.ResumePosition(output=0, position=8)]))
        refused = await two.until_message(stranger, "refused")
        assert refused.failure.cause == wire.CAUSE_ID_REUSED
        await two.cancel(stranger)
        await two.forget(stranger)
        await one.until_message(run, "ended")
        assert one.record_of(run).text(8) == run_alone(work)
        assert not two.record_of(stranger).tokens
        await two.leave()
        await one.forget(run)
        await eventually(lambda: not list(node.decode.runs()))


async def test_an_id_may_have_another_payload_once_the_first_is_forgotten() -> None:
    run, work = make_run(), make_work(8, 4, seed=2)
    run.digest = b"a" * 32
    async with Node("d") as node, Router(node, "one") as one, Router(node, "two") as two:
        await one.start(run, make_work(8, 4, seed=1))
        await one.until_message(run, "ended")
        await one.forget(run)
        await eventually(lambda: not list(node.decode.runs()))
        await two.start(other(run), work)
        await two.until_message(other(run), "ended")
        assert two.record_of(run).text(8) == run_alone(work)


async def test_the_same_payload_attaches_to_the_run_of_another_router() -> None:
    run, work = make_run(), make_work(8, 200)
    run.digest = b"a" * 32
    async with Node("d") as node, Router(node, "one") as one, Router(node, "two") as two:
        node.device.seconds = 0.02
        await one.start(run, work)
        await one.until_tokens(run, 3)
        await two.start(run, work)
        await two.until_message(run, "run_status")
        assert (await one.until_message(run, "superseded")).epoch == 1
        node.device.seconds = 0.0
        await two.until_message(run, "ended")
