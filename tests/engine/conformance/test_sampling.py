from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from decant.engine.logits_processors import Add, Edit, LogitsProcessor
from decant.engine.request import Request, SamplingParams
from tests.engine.conformance.harness import REQUESTS, engine_of, expected
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    make_request,
    prompt,
    run,
)


def test_log_probabilities_are_of_the_generated_tokens(make: MakeDevice) -> None:
    request = make_request("a", 9, logprobs=3, prompt_logprobs=2)
    result = run(engine_of(make), request)["a"]
    assert [entry.token for entry in result.logprobs if entry] == result.text
    assert [entry.token for entry in result.prompt_logprobs] == list(request.token_ids[1:])
    for entry in filter(None, result.logprobs):
        assert entry.rank == 1, "greedy draws the likeliest"
        assert entry.top[0] == (entry.token, entry.logprob)
    for entry, count in [*((e, 3) for e in result.logprobs if e), *((e, 2) for e in result.prompt_logprobs)]:
        assert len(entry.top) == count
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in (entry.logprob, *values))
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert entry.rank == 1 or entry.logprob <= values[0]


def test_log_probabilities_are_emitted_only_on_request(make: MakeDevice) -> None:
    result = run(engine_of(make), REQUESTS[0])["short"]
    assert set(result.logprobs) == {None}
    assert not result.prompt_logprobs
    assert all(entry and not entry.top for entry in expected(make, REQUESTS[3]).logprobs)


def written(make: MakeDevice, length: int = 12, **sampling: Any) -> list[int]:
    request = make_request("a", prompt(40, 5), length, sampling=SamplingParams(**sampling))
    return run(engine_of(make), request)["a"].text


def test_a_bias_forces_a_token_and_forbids_one(make: MakeDevice) -> None:
    assert written(make, logit_bias={7: 100.0}) == [7] * 12
    assert written(make, logit_bias={7: 100.0}, temperature=1.0) == [7] * 12
    first = written(make, 1)[0]
    assert first not in written(make, logit_bias={first: -100.0})


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 10.0}]
)
def test_a_penalty_ends_a_repetition(make: MakeDevice, penalty: dict[str, Any]) -> None:
    biases: Iterator[Any] = ({7: step * 1.5} for step in range(40))
    bias, text = next((bias, text) for bias in biases if (text := written(make, logit_bias=bias)).count(7) > 2)
    changed = written(make, logit_bias=bias, **penalty)
    assert 1 <= changed.count(7) < text.count(7)


def test_a_draw_is_a_function_of_seed_output_and_position(make: MakeDevice) -> None:
    hot: dict[str, Any] = {"temperature": 2.0}
    texts = {tuple(written(make, seed=seed, output_index=index, **hot)) for seed in range(4) for index in range(2)}
    assert len(texts) == 8, "other seeds and other outputs give other texts"
    assert written(make, seed=3, output_index=1, **hot) == written(make, seed=3, output_index=1, **hot)
    assert written(make, 4, seed=3, **hot) == written(make, seed=3, **hot)[:4]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_a_small_top_p_draws_the_likeliest_token(make: MakeDevice, narrow: Mapping[str, Any]) -> None:
    assert written(make, seed=5, **{"temperature": 1.0, **narrow}) == written(make)


class Successor(LogitsProcessor):
    def edit(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> Edit | None:
        return Add(array("q", [tokens[length - 1] + 1]), array("f", [1e4]))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "drawn"])
def test_a_processor_that_a_request_lists_is_asked_for_each_token(
    make: MakeDevice, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Request, "logits_processors", lambda request: (Successor(),))
    requests = [make_request(f"r{last}", (1, 2, last), 9, sampling=SamplingParams(**sampling)) for last in (5, 30)]
    texts = run(engine_of(make), *requests)
    assert [texts[f"r{last}"].text for last in (5, 30)] == [list(range(last + 1, last + 10)) for last in (5, 30)]
