from __future__ import annotations

import dataclasses
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decant.engine.backends import make_backend
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.logits_processors import Penalties, TokenCounts
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.plan import Row
from decant.engine.request import Request, SamplingParams, StopParams
from decant.engine.sampler_state import SamplerState
from decant.engine.scheduler import Limits
from tests.engine import test_bits, tiny

PENALTIES = SamplingParams(
    repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.9, logit_bias={5: 2.0, 9: -3.0}
)


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(0, 40), st.booleans(), st.data())
def test_counts_do_not_depend_on_how_the_tokens_came(
    tokens: list[int], prompt_len: int, with_prompt: bool, data: st.DataObject
) -> None:
    counts = TokenCounts(prompt_len, with_prompt=with_prompt)
    for length in data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)):
        counts.update(tokens, length)
        output = Counter(tokens[prompt_len:length])
        seen = set(tokens[:length]) if with_prompt else set(output)
        assert sorted(counts.tokens) == sorted(seen)
        assert dict(zip(counts.tokens, counts.output, strict=True)) == {token: output[token] for token in seen}


class Read(Sequence[int]):
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.reads = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        found = self.tokens[at]
        self.reads += len(found) if isinstance(found, list) else 1
        return found


@pytest.mark.parametrize("length", [10, 32_000])
def test_the_work_of_a_step_does_not_grow_with_the_tokens(length: int) -> None:
    prompt = [at % 20 for at in range(length)]
    request = Request("r", tuple(prompt), sampling=PENALTIES)
    tokens, state = Read(prompt), SamplerState(request)
    for step in range(5):
        tokens.reads = 0
        row = Row(request, tokens, len(tokens) - 1, len(tokens), (array("i"),), True, state)
        [token] = make_backend(torch.device("cpu")).sampler.sample([row], torch.randn(1, 48), frozenset())
        assert tokens.reads == (1 if step else length)
        [counts] = [one.counts for one in state.processors if isinstance(one, Penalties)]
        assert len(counts.tokens) <= 20 + step, "what a step touches of the logits: distinct tokens"
        tokens.tokens.append(token)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ModelDevice:
    folder: Path = tiny.save(tiny.config("llama"), tmp_path_factory.mktemp("llama"))
    return load(ModelConfig(str(folder), dtype="float32", device="cpu", kv_bytes=2 << 20))


def engine_on(device: ModelDevice, blocks: int = 60) -> Engine:
    limits = Limits(
        token_budget=64, max_running=8, context_length=min(device.context_length, blocks * device.block_size)
    )
    return test_bits.engine_on(device, blocks, limits)[0]


def penalised(id: str = "r", length: int = 30, written: int = 20, **more: Any) -> Request:
    return tiny.greedy(id, tiny.prompt(length, length), written, sampling=PENALTIES, **more)


def outputs(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    return {id: list(tokens) for id, tokens in tiny.run(engine, list(requests)).tokens.items()}


class Bias(dict[int, float]):
    reads = 0

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return super().__iter__()

    def values(self) -> Any:
        self.reads += 1
        return super().values()

    def items(self) -> Any:
        self.reads += 1
        return super().items()


def test_an_engine_keeps_the_counts_and_the_bias_of_a_sequence(
    device: ModelDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = 0
    add = TokenCounts._add

    def counting(counts: TokenCounts, occurrences: Counter[int], weight: int) -> None:
        nonlocal counted
        counted += occurrences.total()
        add(counts, occurrences, weight)

    monkeypatch.setattr(TokenCounts, "_add", counting)
    reads = []
    for written in (2, 20):
        counted, bias = 0, Bias(PENALTIES.logit_bias)
        request = dataclasses.replace(
            penalised(length=30, written=written), sampling=dataclasses.replace(PENALTIES, logit_bias=bias)
        )
        assert len(outputs(engine_on(device), [request])["r"]) == written
        assert counted == 30 + written - 1, "no step follows the last token"
        reads.append(bias.reads)
    assert reads[0] == reads[1] > 0


@pytest.mark.slow
def test_a_preempted_sequence_keeps_its_penalties(device: ModelDevice) -> None:
    batch = [penalised(f"r{length}", length, 60) for length in (3, 5, 9, 12)]
    undisturbed = outputs(engine_on(device), batch)
    tight = engine_on(device, blocks=10)
    assert outputs(tight, batch) == undisturbed
    assert tight.scheduler.preemptions


def test_an_imported_sequence_keeps_its_penalties(device: ModelDevice) -> None:
    request = penalised()
    expected = outputs(engine_on(device), [request])["r"]
    sender, receiver = engine_on(device), engine_on(device)
    test_bits.hand_over(sender, receiver, request)
    written = []
    while receiver.has_work:
        written += [token.token for token in receiver.step().tokens]
    assert written == expected[1:]


@pytest.mark.parametrize("written", [1, 7, 19])
def test_an_adopted_sequence_keeps_its_penalties(device: ModelDevice, written: int) -> None:
    request = penalised()
    expected = outputs(engine_on(device), [request])["r"]
    adopted = dataclasses.replace(
        request, token_ids=(*request.token_ids, *expected[:written]), prompt_tokens=len(request.token_ids)
    )
    assert outputs(engine_on(device), [adopted])["r"] == expected[written:]


def test_a_plain_sequence_keeps_no_state(device: ModelDevice) -> None:
    engine = engine_on(device)
    engine.add(tiny.greedy("plain", tiny.prompt(5, 5), 3))
    engine.add(Request("drawn", tiny.prompt(5, 5), sampling=SamplingParams(temperature=1.0), stop=StopParams(3)))
    plan, _ = engine.scheduler.schedule()
    states = {row.request.id: row.state for row in plan.rows}
    assert states["plain"] is None
    assert states["drawn"] is not None
    assert not states["drawn"].processors
