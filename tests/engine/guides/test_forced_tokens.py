"""Forced tokens: the same outputs in fewer steps, whatever happens to their sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from decant.engine.costs import StepCostModel
from decant.engine.engine import Engine
from decant.engine.guides.guide import Guide, GuideKind
from decant.engine.logits_processors import Allow, Edit, Forbid, only_token
from decant.engine.plan import StepPlan, StepResult
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from tests.engine.factories import OutputLog, export_sequence, import_sequence, make_engine, make_request, run
from tests.engine.guides.scripted import ScriptedGrammar
from tests.engine.guides.test_guided_engine import GUIDES, device, guided
from tests.engine.properties import nothing_is_held, plan_keeps_the_limits, same_output_as_alone

OTHERS = {
    "mostly forced": Guide(GuideKind.REGEX, "(ab|xy)abcdefghijklmnopqrstuvwxyz0123456789(ab|xy)"),
    "ends forced": Guide(GuideKind.CHOICE, choices=("ayes", "bno")),
}


def engine(num_blocks: int = 64, **more: int) -> Engine:
    return make_engine(device=device(num_blocks), **more)


def drawn(request: Request) -> OutputLog:
    """Output of which each token is drawn."""
    made = engine()
    made.most_forced = 0
    return run(made, replace(request, park_after=None))


def free_and_forced(output: Sequence[int]) -> set[int]:
    """One of two tokens, then the only token, and so on."""
    return {7} if len(output) % 2 else {5, 6}


def alternating(id: str = "a", max_tokens: int = 40, **more: Any) -> Request:
    sampling = SamplingParams(temperature=2.0, seed=3)
    grammar = ScriptedGrammar(free_and_forced)
    return make_request(id, [1, 2, 3, 4, 5], max_tokens, sampling=sampling, grammar=grammar, **more)


@pytest.mark.parametrize("guide", (GUIDES | OTHERS).values(), ids=GUIDES | OTHERS)
def test_the_output_is_that_of_drawn_tokens(guide: Guide) -> None:
    for seed in range(4):
        request = guided("a", guide, seed=seed)
        sampling = replace(request.sampling, repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={3: -5.0})
        stop = StopParams(9, stop_token_ids=frozenset({seed}))
        for each in (request, replace(request, sampling=sampling), replace(request, stop=stop)):
            same_output_as_alone(run(engine(), each)["a"], drawn(each)["a"])


def test_forced_tokens_take_no_steps_of_their_own() -> None:
    made = engine()
    log = run(made, guided("a", OTHERS["mostly forced"], max_tokens=60))
    assert len(log["a"].text) == 41
    assert log["a"].reason is FinishReason.STOP
    assert made.steps < 14  # 15 tokens and less behind each draw
    nothing_is_held(made)


def test_an_output_that_can_only_end_ends_with_the_draw_before() -> None:
    made = engine()
    assert len(run(made, guided("a", OTHERS["ends forced"]))["a"].text) in (4, 5)
    assert made.steps == 1


def test_log_probabilities_are_those_of_drawn_tokens() -> None:
    request = alternating(logprobs=3)
    log = run(engine(), request)
    assert None not in log["a"].logprobs
    same_output_as_alone(log["a"], drawn(request)["a"])


@pytest.mark.parametrize("max_tokens", range(5, 9))
def test_an_output_ends_at_its_limit_also_with_a_forced_token(max_tokens: int) -> None:
    made = engine()
    log = run(made, alternating(max_tokens=max_tokens))
    assert (len(log["a"].text), log["a"].reason) == (max_tokens, FinishReason.LENGTH)
    nothing_is_held(made)


def test_sequences_that_preempt_each_other_give_the_outputs_of_drawn_tokens() -> None:
    requests = [alternating(f"a{number}", 40, priority=number % 2) for number in range(6)]
    made = engine(24, context_length=50)
    log = run(made, *requests)
    assert made.scheduler.preemptions
    for request in requests:
        same_output_as_alone(log[request.id], drawn(request)[request.id])
    nothing_is_held(made)


@pytest.mark.parametrize("park_after", [1, 2, 3, 6])
def test_a_sequence_parks_after_exactly_its_tokens_and_goes_on_elsewhere(park_after: int) -> None:
    sender, receiver = engine(), engine()
    request = alternating(park_after=park_after)
    log = run(sender, request)
    assert len(log["a"].text) == park_after
    import_sequence(receiver, request, export_sequence(sender, "a"))
    run(receiver, log=log)
    same_output_as_alone(log["a"], drawn(request)["a"])
    assert receiver.steps < 40 - park_after
    for each in (sender, receiver):
        nothing_is_held(each)


@pytest.mark.parametrize("steps", range(2, 6))
def test_a_sequence_with_a_forced_token_behind_each_draw_can_migrate(steps: int) -> None:
    made, log = engine(), OutputLog()
    made.add(alternating())
    for _ in range(steps):
        log.record(made.step())
    export = made.transfers.export("a")
    for _ in range(3):
        commit = made.transfers.finalize_running("a", len(export.blocks))
        if commit is not None:
            break
        log.record(made.step())
    assert commit is not None
    assert commit.computed == 5 + len(log["a"].text) - 1
    made.transfers.release("a")


def test_forced_tokens_are_computed_with_the_decodes_before_a_more_urgent_prompt() -> None:
    made, log = engine(128, budget=16, max_running=4), OutputLog()
    made.add(alternating())
    log.record(made.step())
    made.add(make_request("prompt", [token % 60 for token in range(80)], priority=10))
    while not log["prompt"].tokens:
        assert any(token.id == "a" for token in log.record(made.step()).tokens)
    assert len(log["a"].tokens) == 14


@pytest.mark.parametrize(("fixed", "is_forced"), [(0.0, True), (0.001, True), (0.0001, False)])
def test_tokens_are_forced_where_their_masks_take_less_time_than_the_steps_saved(fixed: float, is_forced: bool) -> None:
    made = engine()
    made.device.costs = StepCostModel(fixed=fixed)  # type: ignore[misc]
    log = run(made, alternating("a"), alternating("b"))
    assert log["a"].text == log["b"].text == drawn(alternating())["a"].text
    assert (made.steps < 30) == is_forced


@pytest.mark.parametrize("budget", [8, 11, 40])
def test_a_step_keeps_its_budget_with_forced_tokens(budget: int) -> None:
    made = engine(256, budget=budget, max_running=8)
    submit = made.device.submit

    def checked(plan: StepPlan) -> Callable[[], StepResult]:
        plan_keeps_the_limits(made, plan)
        return submit(plan)

    made.device.submit = checked  # type: ignore[method-assign]
    requests = [alternating(f"{number}", 12) for number in range(8)]
    log = run(made, *requests)
    expected = drawn(requests[0])["0"].text
    assert all(log[request.id].text == expected for request in requests)


@pytest.mark.parametrize(
    ("edits", "token"),
    [
        ([Allow((1 << 37).to_bytes(8, "little"))], 37),
        ([Allow((1 << 37 | 1 << 38).to_bytes(8, "little"))], None),
        ([Allow((1 << 37 | 1 << 3).to_bytes(8, "little"))], None),
        ([Allow(bytes(8))], None),
        ([Allow((1 << 10).to_bytes(4, "little")), Forbid({3})], 10),  # byte 1 is 4, and no line feed
        ([Allow((1 << 9 | 1 << 11).to_bytes(4, "little"))], None),  # a line feed
        ([Allow((1 << 37).to_bytes(8, "little")), Forbid({37})], None),
        ([Allow((1 << 37).to_bytes(8, "little")), Allow((1 << 5).to_bytes(4, "little"))], None),
        ([Allow((1 << 5 | 1 << 6).to_bytes(4, "little")), Allow((1 << 5).to_bytes(4, "little"))], 5),
        ([Forbid({1})], None),
        ([], None),
    ],
)
def test_a_token_is_forced_if_the_edits_allow_it_alone(edits: list[Edit], token: int | None) -> None:
    assert only_token(edits) == token
