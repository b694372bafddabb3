from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from decant.bench.calibration.costs import PromptSample, Samples, StepSample, costs
from decant.bench.calibration.experiment import CalibrationOptions, measure
from decant.bench.calibration.running_answers import RunningAnswers
from decant.bench.errors import InvalidBenchmark
from decant.command.app import app
from decant.command.deployment import temporary_deployment
from decant.engine.costs import StepCostModel, chunk
from decant.plan.costs import cost_profile
from decant.protos import inference_pb2 as pb
from decant.runtime.settings import variable_name
from tests.e2e.deployment import Deployment, deployment

PREFILL = StepCostModel(fixed=0.004, token=5e-4, pair=3e-7)
DECODE = StepCostModel(fixed=0.008, token=3e-4, pair=2e-6)
LATENCY, HANDOFF, SENDING = 0.006, 0.011, 0.02


def prompt(tokens: int, factor: float = 1.0) -> PromptSample:
    return PromptSample(tokens, factor * PREFILL.seconds(chunk(0, tokens)))


def step(sequences: int, context: int, factor: float = 1.0) -> StepSample:
    return StepSample(sequences, context, factor * DECODE.seconds(StepSample(sequences, context, 0.0).work))


def samples(prefill_factor: float, step_factor: float) -> Samples:
    lengths = (500, 1000, 2000)
    return Samples(
        lone=[PromptSample(tokens, prompt(tokens).seconds + LATENCY) for tokens in lengths],
        prefills=[prompt(tokens) for tokens in lengths],
        steps=[step(1, 2000), step(4, 64), step(4, 2000), step(8, 2000)],
        handoffs=[step(1, 2000).seconds + HANDOFF] * 3,
        beside=(slow := prompt(2000, prefill_factor)),
        both=(
            slow._replace(seconds=slow.seconds + SENDING),
            (busy := step(4, 2000, step_factor)),
            busy.seconds + 3 * HANDOFF,
        ),
    )


def test_costs_of_exact_samples_are_those_that_made_them() -> None:
    profile = cost_profile.from_document(costs(samples(1.5, 1.2)))
    for tokens in (300, 700, 1500):
        assert profile.prefill.seconds(chunk(0, tokens)) == pytest.approx(PREFILL.seconds(chunk(0, tokens)))
    for one in (step(2, 1000), step(6, 300)):
        assert profile.decode.seconds(one.work) == pytest.approx(one.seconds)
    assert (profile.overheads.latency, profile.overheads.handoff) == pytest.approx((LATENCY, HANDOFF))
    assert profile.overheads.sending == pytest.approx(SENDING / 2000)
    assert profile.overheads.contention.prefill == pytest.approx(1.5)
    assert profile.overheads.contention.decode == pytest.approx(1.2)
    assert profile.overheads.contention.handoff == pytest.approx(3)


def test_work_that_is_faster_beside_other_work_is_no_negative_contention() -> None:
    profile = cost_profile.from_document(costs(samples(0.9, 0.95)))
    assert (profile.overheads.contention.prefill, profile.overheads.contention.decode) == (1.0, 1.0)


@pytest.mark.slow
def test_the_command_measures_a_deployment_and_the_plan_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def started(*arguments: str, variables: Mapping[str, str]) -> Iterator[Deployment]:
        assert arguments == ("--prefill", "1", "--decode", "1", "--kv-memory", "64M")
        threshold = int(variables[variable_name("handoff_min_tokens")])
        with deployment(dtype="auto", handoff_min_tokens=threshold) as running:
            yield running

    monkeypatch.setattr(temporary_deployment, "temporary_deployment", started)
    lengths = ("--prompt-tokens", "64", "--output-tokens", "8", "--kv-memory", "64M")
    done = CliRunner().invoke(app, ["bench", "calibrate", *lengths])
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    profile = cost_profile.from_document(document)
    assert profile.prefill.seconds(chunk(0, 64)) >= profile.prefill.seconds(chunk(0, 1)) > 0
    assert {one[0] for one in document["samples"]["prefills"]} == {16, 32, 64}
    assert {one[0] for one in document["samples"]["steps"]} >= {1, document["samples"]["both"][1][0]}


def test_lengths_beyond_the_context_are_refused() -> None:
    class Client:
        async def model(self, id: str) -> pb.Model:
            return pb.Model(id="m", max_context_length=2048, vocab_size=512)

    client: Any = Client()
    with pytest.raises(InvalidBenchmark, match=r"--prompt-tokens: at most 2,048 with the output.*got 2500"):
        asyncio.run(measure(client, CalibrationOptions(2000, 500), lambda *_: None))


class ShortAnswers:
    def __init__(self, most: int) -> None:
        self.left = most

    @asynccontextmanager
    async def stream(self, prompt: Sequence[int], **_: object) -> AsyncIterator[AsyncIterator[pb.Delta]]:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("lost")

        async def deltas() -> AsyncIterator[pb.Delta]:
            for _ in range(3):
                await asyncio.sleep(0)
                yield pb.Delta(num_tokens=1)

        yield deltas()


async def test_an_answer_that_fills_the_context_begins_again() -> None:
    model = pb.Model(max_context_length=8, vocab_size=5)
    async with RunningAnswers(cast(Any, ShortAnswers(1_000_000)), model, 2, 5, 0) as answers:
        await answers.wait_for_more(20)


async def test_an_answer_that_fails_ends_a_measurement() -> None:
    model = pb.Model(max_context_length=8, vocab_size=5)
    with pytest.raises(ConnectionError):
        async with RunningAnswers(cast(Any, ShortAnswers(20)), model, 2, 5, 0) as answers:
            await answers.wait_for_more(1_000)
