from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from decant.command.app import app
from decant.command.deployment import deployments
from decant.command.deployment.deployments import Deployment
from decant.command.deployment.processes import Process
from decant.command.deployment.waiting import Waiting
from decant.command.errors import CommandFailed
from decant.command.status import rows_of
from decant.protos.state_pb2 import RouterRegistration, WorkerRegistration
from decant.protos.worker_pb2 import ROLE_DECODE, Load, Peer
from decant.runtime.error_details import Reason
from decant.runtime.errors import Unavailable
from decant.state.directory import DirectoryEntry, Listing
from tests.decant.scripted import Script, serving


class Here:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[Deployment | None] = []
        monkeypatch.setattr(deployments, "latest", lambda _: self._next())
        monkeypatch.setattr(deployments, "of", lambda _: self._next())

    def _next(self) -> Deployment | None:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(monkeypatch)


def deployment(
    address: str = "h:1", *, has_started: bool = True, is_ending: bool = False, **states: Process
) -> Deployment:
    processes = {name.replace("_", "-"): one for name, one in states.items()}
    return Deployment(7, (address,), "unix:///r", processes=processes, has_started=has_started, is_ending=is_ending)


READY, LOADING = Process(2, "ready"), Process(3, "loading", 40)
LOST = Process(3, "lost", lost_at=0.0)


def test_commands_wait_for_a_starting_deployment_and_say_so(here: Here) -> None:
    starting = deployment(has_started=False, decode_1=LOADING)
    here.states = [starting, starting, deployment(decode_1=READY)]
    messages: list[str] = []
    assert Waiting("--address", 60, messages.append, poll_s=0.0).deployment().has_started
    assert messages == ["`decant up` (process 7) is starting: decode-1 (loading 40 %)"]


@pytest.mark.parametrize("command", ["audit", "status"])
def test_audit_and_status_wait_for_their_wait_option(here: Here, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    asked: list[str] = []

    def answer(redis_url: str, *_: object, **__: object) -> bool:
        asked.append(redis_url)
        return True

    monkeypatch.setattr(f"decant.command.{command}.run", answer)
    starting = deployment(has_started=False, decode_1=LOADING)
    here.states = [starting, starting, deployment(decode_1=READY)]
    done = CliRunner().invoke(app, [command, "--wait", "60"])
    assert (done.exit_code, asked) == (0, ["unix:///r"])
    assert "is starting: decode-1 (loading 40 %)" in done.stderr
    assert len(here.states) == 1, "the deployment has started"


def test_a_deployment_that_starts_is_an_error_without_patience(here: Here) -> None:
    here.states = [deployment(has_started=False, decode_1=LOADING)]
    with pytest.raises(CommandFailed, match=r"decode-1 \(loading 40 %\); --wait SECONDS waits for it"):
        Waiting("--address", 0, poll_s=0.0).deployment()


def test_a_deployment_of_which_there_is_no_trace_is_waited_for_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([None, None, deployment()])

    def latest(_: str) -> Deployment:
        if (one := next(found)) is None:
            raise CommandFailed("no deployment")
        return one

    monkeypatch.setattr(deployments, "latest", latest)
    with pytest.raises(CommandFailed, match="no deployment"):
        Waiting("--address", None, poll_s=0.0).deployment()
    messages: list[str] = []
    assert Waiting("--address", 60, messages.append, poll_s=0.0).deployment().has_started
    assert messages == ["waiting for a deployment on this machine"]


def test_a_restart_is_waited_for_until_all_are_ready(here: Here) -> None:
    here.states = [deployment(decode_1=LOST), deployment(decode_1=LOADING), deployment(decode_1=READY)]
    assert Waiting("--address", 60, lambda _: None, poll_s=0.0).for_restart(deployment())
    here.states = [deployment(decode_1=READY)]
    assert not Waiting("--address", 60, poll_s=0.0).for_restart(deployment()), "nothing is started again"
    here.states = [deployment(decode_1=LOST), None]
    assert not Waiting("--address", 60, lambda _: None, poll_s=0.0).for_restart(deployment()), (
        "the deployment has ended"
    )
    here.states = [deployment(decode_1=LOST)]
    assert not Waiting("--address", 0, poll_s=0.0).for_restart(deployment())


def test_a_deployment_that_ends_is_not_waited_for(here: Here) -> None:
    draining = Process(3, "draining")
    here.states = [deployment(decode_1=draining, is_ending=True)]
    with pytest.raises(CommandFailed, match=r"`decant up` \(process 7\) is ending"):
        Waiting("--address", 60, poll_s=0.0).for_restart(deployment())


@pytest.fixture
def router() -> Iterator[tuple[Script, str]]:
    script = Script()
    with serving(script) as address:
        yield script, address


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_question_is_asked_again_once_the_worker_is_back(
    here: Here, router: tuple[Script, str], comes_back: bool
) -> None:
    script, address = router
    script.refusal = Unavailable(Reason.NO_WORKER, "no worker serves this model", retry_after=0.0)
    lost, back = deployment(address, decode_1=LOST), deployment(address, decode_1=READY)

    def states() -> Iterator[Deployment]:
        yield lost
        yield lost
        if comes_back:
            script.refusal = None
            while True:
                yield back
        while True:
            yield lost

    following = states()
    here._next = lambda: next(following)  # type: ignore[method-assign]
    done = CliRunner().invoke(app, ["generate", "x", "--json", "--wait", "60" if comes_back else "0"])
    if comes_back:
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["text"] == "abc"
        assert "decant: waiting for decode-1 (lost " in done.stderr
    else:
        assert done.exit_code == 1
        assert done.stderr == "decant: no worker serves this model\n"


def registered(id: str, load: Load, renewed_ago_s: float = 0.0) -> DirectoryEntry[WorkerRegistration]:
    registration = WorkerRegistration(peer=Peer(id=id), role=ROLE_DECODE, address="h:2", model="m")
    return DirectoryEntry(registration, load, renewed_ago_s)


def test_the_state_of_each_process_is_shown() -> None:
    workers = [
        registered("decode-1", Load()),
        registered("decode-2", Load(draining=True)),
        registered("decode-3", Load(), renewed_ago_s=3.4),
        registered("decode-4", Load()),
        registered("decode-8", Load()),
    ]
    router = DirectoryEntry(RouterRegistration(peer=Peer(id="router-1"), address="h:1"), Load(running=3, waiting=2))
    now_lost = Process(9, "lost", lost_at=10**12)
    here = deployment(decode_1=READY, decode_4=now_lost, decode_5=LOADING, decode_6=Process(6), decode_7=READY)
    here.processes["decode-8"] = Process(8, "draining")
    rows = rows_of(Listing(b"", None, tuple(workers)), Listing(b"", None, (router,)), here)
    assert [(row.name, row.role, row.state) for row in rows] == [
        ("router-1", "router", "ready"),
        ("decode-1", "decode", "ready"),
        ("decode-2", "decode", "draining"),
        ("decode-3", "decode", "lost 3 s ago"),
        ("decode-4", "decode", "lost 0 s ago"),
        ("decode-8", "decode", "draining"),
        ("decode-5", "decode", "loading 40 %"),
        ("decode-6", "decode", "starting"),
        ("decode-7", "decode", "not registered"),
    ]
    assert rows[0].load == Load(running=3, waiting=2)


def test_a_process_is_found_by_its_name_on_a_redis_that_deployments_share() -> None:
    import os

    shared = registered(f"decode-1@{os.uname().nodename}:7", Load())
    other = registered("decode-1@elsewhere:7", Load())
    here = deployment(decode_1=LOADING)
    rows = rows_of(Listing(b"", None, (shared, other)), Listing(b"", None, ()), here)
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("process", "text"),
    [
        (Process(1), "starting"),
        (Process(1, "loading", 7), "loading 7 %"),
        (Process(1, "warming up"), "warming up"),
        (Process(1, "ready", lost_at=90.0), "ready"),
        (Process(1, "lost", lost_at=96.8), "lost 3 s ago"),
        (Process(1, "loading", 40, lost_at=97.0), "lost 3 s ago, loading 40 %"),
    ],
)
def test_each_state_has_a_description(process: Process, text: str) -> None:
    assert process.describe(now=100.0) == text
