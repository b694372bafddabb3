from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from decant.engine.engine import Engine
from decant.engine.errors import InvalidConfig
from decant.engine.fake import FakeDevice
from decant.engine.output import StepOutput
from decant.engine.plan import StepPlan, StepResult
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from tests.engine.factories import (
    BLOCK,
    CONTEXT_LENGTH,
    VOCABULARY,
    OutputLog,
    export_sequence,
    import_sequence,
    make_engine,
    make_request,
    prompt,
    run,
    run_alone,
)
from tests.engine.properties import nothing_is_held, same_output_as_alone

EOS = frozenset(range(0, VOCABULARY, 40))


class Speculative(FakeDevice):
    lookahead = BLOCK - 1
    returned = 0

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        self.returned += sum(map(len, result.further.values()))
        return result


def make_device(num_blocks: int = 64, kind: type[FakeDevice] = Speculative) -> FakeDevice:
    return kind(
        num_blocks=num_blocks,
        block_size=BLOCK,
        vocab_size=VOCABULARY,
        context_length=CONTEXT_LENGTH,
        eos_token_ids=EOS,
    )


def single_tokens() -> Engine:
    return make_engine(device=make_device(kind=FakeDevice))


def several_tokens(num_blocks: int = 64) -> Engine:
    return make_engine(device=make_device(num_blocks), num_blocks=num_blocks)


REQUESTS = {
    "greedy": make_request("greedy", 6, 40, stop=StopParams(max_tokens=40, ignore_eos=True)),
    "ends at a stop token": make_request("stop", 9, 80),
    "one token": make_request("one", 5, 1),
    "at the context length": make_request("long", prompt(30, 3), stop=StopParams(ignore_eos=True)),
    "random, with log-probabilities": make_request(
        "random", 7, 30, sampling=SamplingParams(temperature=1.2, seed=5), logprobs=2, prompt_logprobs=1
    ),
    "penalties": make_request("penalties", 7, 30, sampling=SamplingParams(repetition_penalty=1.5, frequency_penalty=1)),
    "a minimum": make_request("minimum", 8, stop=StopParams(min_tokens=20, max_tokens=25)),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_output_is_that_of_single_tokens(name: str) -> None:
    engine = several_tokens()
    same_output_as_alone(run(engine, REQUESTS[name])[REQUESTS[name].id], run_alone(REQUESTS[name], single_tokens))
    nothing_is_held(engine)


def test_several_tokens_a_step_take_fewer_steps() -> None:
    one, several = single_tokens(), several_tokens()
    for engine in (one, several):
        run(engine, REQUESTS["greedy"])
    assert several.steps < 0.6 * one.steps


@pytest.mark.parametrize("num_blocks", [30, 40])
def test_sequences_that_preempt_each_other_generate_as_alone(num_blocks: int) -> None:
    engine = several_tokens(num_blocks)
    requests = [replace(request, id=f"{name}-{copy}") for name, request in REQUESTS.items() for copy in range(2)]
    log = run(engine, *requests)
    assert engine.load().preemptions
    for request in requests:
        same_output_as_alone(log[request.id], run_alone(request, single_tokens))
    nothing_is_held(engine)


def checked(engine: Engine, check: Callable[[StepOutput], None]) -> None:
    while engine.has_work:
        check(engine.step())
        engine.check_integrity()


def test_kv_of_rejected_tokens_is_not_counted_as_computed() -> None:
    engine = several_tokens()
    engine.add(REQUESTS["greedy"])
    sequence = engine.sequences["greedy"]

    def check(output: StepOutput) -> None:
        if sequence.num_output and not output.ended:
            assert sequence.num_remaining == 1
            assert len(sequence.timeline.tokens) == sequence.num_output

    checked(engine, check)


def test_tokens_behind_the_end_are_neither_emitted_nor_cached() -> None:
    for most in range(4, 12):
        engine = several_tokens()
        request = make_request("short", 6, stop=StopParams(max_tokens=most, ignore_eos=True))
        result = run(engine, request)["short"]
        assert (len(result.text), result.reason) == (most, FinishReason.LENGTH)
        longer = make_request("longer", (*request.token_ids, *result.text), 9)
        output = run(engine, longer)["longer"]
        assert output.started is not None
        assert output.started.cached == (request.prompt_len + most - 1) // BLOCK * BLOCK
        same_output_as_alone(output, run_alone(longer, single_tokens))


@pytest.mark.parametrize("park_after", [1, 2, 5, 6])
def test_a_sequence_parks_after_exactly_its_tokens_and_goes_on_elsewhere(park_after: int) -> None:
    sender, receiver = several_tokens(), several_tokens()
    request = replace(REQUESTS["greedy"], park_after=park_after)
    log: OutputLog = run(sender, request)
    assert len(log["greedy"].text) == park_after
    import_sequence(receiver, request, export_sequence(sender, "greedy"))
    run(receiver, log=log)
    same_output_as_alone(log["greedy"], run_alone(request, single_tokens))
    for engine in (sender, receiver):
        nothing_is_held(engine)


def test_no_more_tokens_come_than_a_rows_blocks_have_slots_for() -> None:
    class Checked(Speculative):
        def run(self, plan: StepPlan) -> StepResult:
            result = super().run(plan)
            for index, further in result.further.items():
                row = plan.rows[index]
                slots = len(row.blocks[0]) * BLOCK - row.end
                assert len(further) <= slots
                if row.end - row.start == 1:
                    assert slots >= min(self.lookahead, CONTEXT_LENGTH - row.end - 1)
            return result

    device = make_device(kind=Checked)
    run(make_engine(device=device), *REQUESTS.values())
    assert isinstance(device, Checked)
    assert device.returned > 20


def test_a_lookahead_of_a_block_is_refused() -> None:
    class TooFar(FakeDevice):
        lookahead = BLOCK

    with pytest.raises(InvalidConfig, match="lookahead"):
        make_engine(device=make_device(kind=TooFar))


def test_single_tokens_are_unchanged() -> None:
    engine = single_tokens()
    request: Request = REQUESTS["greedy"]
    engine.add(request)
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.running:
            assert sequence.block_table is not None
            assert sequence.block_table.num_blocks == engine.pool.blocks_for(sequence.num_computed)
