"""The limit of an output's reasoning, by its tokens alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from decant.engine.errors import InvalidRequest
from decant.engine.fake import FakeDevice
from decant.engine.guides.guide import Guide, GuideKind
from decant.engine.reasoning import ReasoningCount, ReasoningLimit, ReasoningMarkers
from decant.engine.request import Request, SamplingParams, StopParams
from tests.engine.factories import make_engine, make_request
from tests.engine.guides.test_guided_engine import run
from tests.engine.guides.tiny_tokenizer import END, compiler

BEGIN, MARK, CLOSE = 57, 58, 59
SIMPLE = ReasoningMarkers((BEGIN,), CLOSE)
LONG = ReasoningMarkers((BEGIN, 3, MARK), CLOSE)
BIAS = {BEGIN: 3.0, MARK: 3.0, 3: 3.0, CLOSE: -3.0}


def device(num_blocks: int = 64) -> FakeDevice:
    return FakeDevice(num_blocks=num_blocks, block_size=4, vocab_size=END + 1, eos_token_ids=frozenset({END}))


def limited(markers: ReasoningMarkers, most: int, seed: int = 1, **fields: Any) -> Request:
    sampling = SamplingParams(temperature=3.0, seed=seed, logit_bias=BIAS)
    stop = StopParams(40, ignore_eos="grammar" not in fields)
    return make_request(
        f"r{seed}", [1, 2, 3], sampling=sampling, stop=stop, reasoning=ReasoningLimit(markers, most), **fields
    )


def follow(markers: ReasoningMarkers, most: int, output: Sequence[int]) -> int:
    """Check an output token by token; return its reasoning tokens."""
    count = ReasoningCount(markers)
    for token in output:
        if count.is_open and count.count >= most:
            assert token == CLOSE
        before = count.is_open
        count.add((token,))
        assert before or not count.is_open or count.count < most or most == 0 or count.count == 0
    return count.count


@pytest.mark.parametrize("markers", [SIMPLE, LONG, replace(SIMPLE, is_open=True), replace(LONG, is_open=True)], ids=str)
@pytest.mark.parametrize("most", [0, 1, 5])
def test_no_output_reasons_longer_than_its_limit(markers: ReasoningMarkers, most: int) -> None:
    requests = [limited(markers, most, seed) for seed in range(8)]
    outputs, _ = run(make_engine(device=device(512), max_running=8), *requests)
    counts = [follow(markers, most, output) for output in outputs.values()]
    assert max(counts) <= most
    assert max(counts) == most or not markers.is_open
    for output in outputs.values():
        if markers.is_open:
            assert CLOSE in output[: most + 1]


@pytest.mark.parametrize("markers", [SIMPLE, replace(LONG, is_open=True)], ids=str)
def test_an_engine_that_gets_the_first_tokens_of_an_output_ends_its_reasoning_where_one_engine_does(
    markers: ReasoningMarkers,
) -> None:
    request = limited(markers, 3)
    outputs, _ = run(make_engine(device=device()), request)
    for count in range(1, len(outputs["r1"])):
        tokens = (*request.token_ids, *outputs["r1"][:count])
        rest, _ = run(make_engine(device=device()), replace(request, token_ids=tokens, prompt_tokens=3))
        assert rest["r1"] == outputs["r1"][count:]


def test_sequences_that_are_preempted_end_their_reasoning_where_each_does_alone() -> None:
    requests = [limited(replace(SIMPLE, is_open=bool(seed % 2)), seed, seed) for seed in range(1, 6)]
    alone = {request.id: run(make_engine(device=device()), request)[0][request.id] for request in requests}
    engine = make_engine(device=device(14), context_length=50)
    outputs, _ = run(engine, *requests)
    assert engine.scheduler.preemptions
    assert outputs == alone


def test_a_grammar_of_reasoning_and_answer_agrees_with_the_limit() -> None:
    lark = f"start: <[^{BEGIN},{CLOSE},{END}]>* <[{CLOSE}]> /[a-f]{{4}}/"
    grammar = compiler().grammar(Guide(GuideKind.ANSWER, json.dumps({"grammars": [{"lark_grammar": lark}]})))
    outputs, _ = run(make_engine(device=device()), limited(replace(SIMPLE, is_open=True), 6, grammar=grammar))
    assert outputs["r1"][6] == CLOSE
    assert len(outputs["r1"]) == 12


def test_a_marker_outside_of_the_vocabulary_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_engine(device=device()).add(limited(ReasoningMarkers((BEGIN,), END + 1), 1))
    assert refused.value.field == "reasoning"
    with pytest.raises(InvalidRequest, match=r"reasoning\.begin"):
        ReasoningLimit(ReasoningMarkers((), 1), 1)
