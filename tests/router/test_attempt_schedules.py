"""In every order of messages, losses and breaks that the protocol allows, each position is written once, the end is
reported once, and no worker keeps anything of the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.protos.state_pb2 import RequestRecord
from decant.router.request.output import Finish
from decant.runtime.errors import Cancelled, ServiceError
from decant.state.ids import Incarnation
from decant.state.journal import Entry
from decant.state.owned import StoredRequest
from tests.router.attempt_harness import Case, Scenario
from tests.router.fake_script import LAYOUT_HASH, MODEL
from tests.router.scripted_runs import PROMPT, ScriptedRun
from tests.router.virtual_time import run, settle

RunStatus = wire.RunStatus
STEPS = 160
UNSHRUNK = (Phase.reuse, Phase.generate)
"""One byte less changes the meaning of all that follow: shrinking takes minutes and gains little."""


async def follow(case: Case, roles: dict[str, wire.Role], *, drains: int | None = None) -> Scenario:
    scenario = Scenario(case, roles)
    await scenario.connect()
    scenario.begin()
    await play(scenario, drains)
    return scenario


async def play(scenario: Scenario, drains: int | None = None) -> None:
    await settle()
    scenario.check()
    for number, choice in enumerate(scenario.case.schedule):
        if number == drains:
            begin_drain(scenario)
        await scenario.act(number, choice)
    if drains is not None and drains >= len(scenario.case.schedule):
        begin_drain(scenario)
    if scenario.case.is_cancelled:
        scenario.execution.close(Cancelled(), wire.Cancel.REASON_CLIENT)
    await scenario.finish()
    scenario.check_end()
    await scenario.watching.close()
    await scenario.pool.membership.close()


def begin_drain(scenario: Scenario) -> None:
    busy = [worker for worker in scenario.decode_workers if worker.runs]
    (busy or scenario.decode_workers)[0].is_draining = True


SPLIT = {"p": wire.ROLE_PREFILL, "q": wire.ROLE_PREFILL, "d": wire.ROLE_DECODE, "e": wire.ROLE_DECODE}
DECODE = {"d": wire.ROLE_DECODE, "e": wire.ROLE_DECODE, "f": wire.ROLE_DECODE}


def cases(names: str) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        schedule=st.binary(min_size=STEPS, max_size=STEPS) | st.binary(max_size=STEPS),
        max_tokens=st.integers(1, 6),
        stops_at=st.none() | st.integers(0, 4),
        stop_string_at=st.none() | st.integers(0, 3),
        has_prompt_logprobs=st.booleans(),
        faults=st.integers(0, 3),
        full_rounds=st.sampled_from([0, 0, 24]),
        dies=st.sampled_from(["", *names]),
        is_cancelled=st.sampled_from([False, False, False, True]),
        outputs=st.sampled_from([1, 1, 3]),
    )


@pytest.mark.slow
@settings(max_examples=100, phases=UNSHRUNK)
@given(cases("pd"))
def test_a_split_request_survives_any_schedule(case: Case) -> None:
    run(follow(case, SPLIT))


@pytest.mark.slow
@settings(max_examples=50, phases=UNSHRUNK)
@given(cases("d"))
def test_a_request_that_one_worker_runs_survives_any_schedule(case: Case) -> None:
    run(follow(case, DECODE))


@pytest.mark.slow
@settings(max_examples=100, phases=UNSHRUNK)
@given(cases("de"), st.sampled_from([SPLIT, DECODE]), st.integers(0, STEPS))
def test_a_request_that_migrates_survives_any_schedule(case: Case, roles: dict[str, wire.Role], drains: int) -> None:
    run(follow(replace(case, max_tokens=6 + case.max_tokens), roles, drains=drains))


@pytest.fixture(autouse=True, scope="module")
def quiet_log() -> Iterator[None]:
    with capture_logs():
        yield


PHASES = [None, RunStatus.PHASE_WAITING, RunStatus.PHASE_RUNNING, RunStatus.PHASE_ENDED]


@pytest.mark.slow
@settings(max_examples=50, phases=UNSHRUNK)
@given(cases("d"), st.sampled_from(PHASES), st.integers(0, 4), st.none() | st.integers(0, STEPS))
def test_an_adopted_request_survives_any_schedule(
    case: Case, phase: wire.RunStatus.Phase | None, written: int, drains: int | None
) -> None:
    run(follow_adopted(case, phase, written, drains))


def test_a_run_whose_tokens_are_all_stored_is_forgotten_where_it_ran() -> None:
    scenario = run(follow_adopted(Case(b""), RunStatus.PHASE_ENDED, 4, None))
    assert isinstance(scenario.stream.end, Finish)
    assert not scenario.world.workers["d"].runs


@pytest.mark.parametrize("stops_at", [None, 0, 2])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("roles", [SPLIT, DECODE], ids=["split", "one worker"])
def test_prompt_logprobs_that_were_not_stored_are_computed_without_another_token(
    stops_at: int | None, outputs: int, roles: dict[str, wire.Role]
) -> None:
    case = Case(b"", stops_at=stops_at, outputs=outputs, has_prompt_logprobs=True)
    scenario = run(follow_adopted(case, RunStatus.PHASE_ENDED, case.max_tokens, None, roles))
    assert isinstance(scenario.stream.end, Finish)
    assert scenario.stream.has_prompt_logprobs


async def follow_adopted(
    case: Case,
    phase: wire.RunStatus.Phase | None,
    written: int,
    drains: int | None,
    roles: dict[str, wire.Role] = DECODE,
) -> Scenario:
    """Adopt a run in `phase` at its worker, None if unknown there, of which `written` tokens are stored."""
    scenario = Scenario(replace(case, stop_string_at=None), roles)
    await scenario.connect()
    world = scenario.world
    indexes = range(case.outputs)
    shortest = min(len(world.answer(index)) for index in indexes)
    written = min(written, shortest if phase == RunStatus.PHASE_ENDED else shortest - 1)
    before = place_run(scenario, phase, written)
    record = RequestRecord(model=MODEL, prompt_tokens=len(PROMPT))
    holder = world.workers["d"].registration.peer
    record.attempts.add(attempt=1, decode_worker=holder, layout_hash=LAYOUT_HASH)
    entries = [Entry(index, token) for index in indexes for token in world.answer(index)[:written]]
    request = scenario.request()
    stored = StoredRequest(
        key=request.key,
        epoch=2,
        attempt=1,
        state=Generation.STATE_DECODING,
        owner=Incarnation.of(scenario.router.peer),
        stream_epoch=0,
        record=record,
        payload=request.payload,
        entries=entries,
        length=len(entries),
        expires_in_s=60.0,
    )
    scenario.begin(stored)
    if before is None or case.has_prompt_logprobs:
        scenario.faults_done = 1  # another attempt may be needed: the run is lost, or brings what it brought before
    await play(scenario, drains)
    assert isinstance(scenario.stream.end, Finish | ServiceError)
    return scenario


def place_run(scenario: Scenario, phase: wire.RunStatus.Phase | None, written: int) -> ScriptedRun | None:
    if phase is None:
        return None
    request, world = scenario.request(), scenario.world
    before = wire.Run(request=str(request.key), epoch=1, attempt=1)
    found = world.workers["d"].begin(wire.Start(run=before, engine_request=request.engine_request))
    found.is_attached = False
    if phase != RunStatus.PHASE_WAITING:
        found.phase, found.is_decoding = RunStatus.PHASE_RUNNING, True
        found.tokens = {index: world.answer(index)[:written] for index in found.tokens}
    for index in found.tokens if phase == RunStatus.PHASE_ENDED else ():
        if found.tokens[index] == world.answer(index):
            found.finish_output(index, wire.OutputEnd.REASON_LENGTH)
    while phase == RunStatus.PHASE_ENDED and found.live:
        found.decode(found.live[0])
    return found


@pytest.mark.parametrize("roles", [SPLIT, DECODE], ids=["split", "one worker"])
def test_without_faults_one_attempt_is_enough(roles: dict[str, wire.Role]) -> None:
    for outputs in (1, 3):
        scenario = run(follow(Case(b"", outputs=outputs), roles))
        assert [output.tokens for output in scenario.stream.outputs] == [scenario.world.answer(0)] * outputs
