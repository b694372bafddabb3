"""Each sampler applies each processor, alone and in order, and one that it has never seen."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import pytest
import torch

from decant.engine import fake
from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.cpu.sampler import NativeSampler
from decant.engine.errors import InvalidRequest
from decant.engine.guides.mask import GuideMask
from decant.engine.logits_processors import Add, Allow, Bias, Edit, Forbid, LogitsProcessor, MinLength, Penalties
from decant.engine.model.sampler import Sampler
from decant.engine.plan import Row
from decant.engine.reasoning import ReasoningBudget, ReasoningLimit, ReasoningMarkers
from decant.engine.request import Request, SamplingParams, StopParams
from decant.engine.sampler_state import SamplerState
from tests import gpu
from tests.engine.guides.scripted import ScriptedGrammar

LIKELY = [11 + 3 * rank for rank in range(fake.CANDIDATES)]
"""Tokens by rank; the others have lower logits."""

FIRST, SECOND, THIRD, *_ = LIKELY
VOCABULARY = 64
PROMPT = (FIRST, 2)
OUTPUT = (FIRST, 3)

REQUESTS: dict[type[LogitsProcessor], list[dict[str, Any]]] = {
    Bias: [{"logit_bias": {FIRST: -50.0, SECOND: 1.0}}],
    MinLength: [{"stop": StopParams(min_tokens=len(OUTPUT) + 1, stop_token_ids=frozenset({FIRST}))}],
    Penalties: [{"repetition_penalty": 10.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}],
    GuideMask: [{"grammar": ScriptedGrammar(lambda output: {SECOND, 1, 63})}],
    ReasoningBudget: [
        {"reasoning": ReasoningLimit(ReasoningMarkers((THIRD,), SECOND, is_open=True), len(OUTPUT))},
        {"reasoning": ReasoningLimit(ReasoningMarkers((FIRST,), THIRD), 0), "tokens": (*PROMPT, 3)},
    ],
}
"""Requests with one processor each, by which the second token becomes the likeliest."""

CASES = [(kind, fields) for kind, of_kind in REQUESTS.items() for fields in of_kind]

Draw = Callable[[Row, frozenset[int]], int]


def draw_of(sampler: Sampler, device: str = "cpu") -> Draw:
    logits = torch.full((1, VOCABULARY), -20.0)
    logits[0, LIKELY] = torch.tensor(fake.WEIGHTS)
    logits = logits.to(device)

    def draw(row: Row, eos: frozenset[int]) -> int:
        return sampler.sample([row], logits, eos)[0]

    return draw


def draw_on_the_fake(row: Row, eos: frozenset[int]) -> int:
    return fake.draw(LIKELY, row, eos)


@pytest.fixture(params=["fake", "torch", "compiled", pytest.param("triton", marks=pytest.mark.slow)])
def draw(request: pytest.FixtureRequest) -> Draw:
    match request.param:
        case "fake":
            return draw_on_the_fake
        case "torch":
            return draw_of(Sampler())
        case "compiled":
            if KERNELS is None:
                pytest.skip("this CPU has no AVX2, or no compiler was here")
            return draw_of(NativeSampler(KERNELS))
    pytest.importorskip("triton")
    from decant.engine.cuda.sampler import TritonSampler

    return draw_of(TritonSampler(), gpu.device_type())


@pytest.fixture(params=[{}, {"temperature": 1.0, "top_k": 1}], ids=["greedy", "drawn"])
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    fields: dict[str, Any] = request.param
    return fields


def row_of(stop: StopParams | None = None, tokens: Sequence[int] = (*PROMPT, *OUTPUT), **fields: Any) -> Row:
    own = {name: fields.pop(name, None) for name in ("grammar", "reasoning")}
    request = Request("r", PROMPT, sampling=SamplingParams(**fields), stop=stop or StopParams(), **own)
    return Row(request, tokens, len(tokens) - 1, len(tokens), (array("i"),), True, SamplerState(request))


def test_each_processor_and_each_kind_of_edit_has_a_case() -> None:
    ours = {kind for kind in LogitsProcessor.__subclasses__() if kind.__module__.startswith("decant.engine.")}
    assert ours == set(REQUESTS)
    edits = [edit for _, fields in CASES for edit in row_of(**fields).edits(frozenset())]
    assert {type(edit) for edit in edits} == set(get_args(Edit))


def test_a_request_without_processors_draws_by_the_logits_alone(draw: Draw, way: dict[str, Any]) -> None:
    row = row_of(**way)
    assert row.request.is_plain_greedy is (not way)
    assert not row.edits(frozenset())
    assert draw(row, frozenset()) == FIRST


@pytest.mark.parametrize(("kind", "fields"), CASES, ids=str)
def test_each_sampler_applies_each_processor(
    draw: Draw, way: dict[str, Any], kind: type[LogitsProcessor], fields: dict[str, Any]
) -> None:
    row = row_of(**fields, **way)
    assert not row.request.is_plain_greedy
    assert row.state
    assert [type(processor) for processor in row.state.processors] == [kind]
    assert draw(row, frozenset()) == SECOND


def test_an_end_token_of_the_model_is_not_drawn_before_the_minimum_length(draw: Draw, way: dict[str, Any]) -> None:
    for least, expected in ((len(OUTPUT), FIRST), (len(OUTPUT) + 1, SECOND)):
        assert draw(row_of(StopParams(min_tokens=least), **way), frozenset({FIRST})) == expected


def test_each_sampler_applies_bias_then_minimum_length_then_penalties(draw: Draw, way: dict[str, Any]) -> None:
    biased = {"logit_bias": {SECOND: 4.0, THIRD: 90.0}, "repetition_penalty": 10.0}
    row = row_of(StopParams(min_tokens=9, stop_token_ids=frozenset({THIRD})), (*PROMPT, SECOND), **biased, **way)
    assert [type(edit) for edit in row.edits(frozenset())] == [kind for kind in get_args(Edit) if kind is not Allow]
    assert draw(row, frozenset()) == SECOND, "the bias made its logit positive before the penalty divides it"


def test_each_sampler_draws_among_the_allowed_tokens_alone(draw: Draw, way: dict[str, Any]) -> None:
    """Also those of the lowest logits, in any word of the mask, and against any bias."""
    for token in (0, 31, 32, VOCABULARY - 1):
        grammar = ScriptedGrammar(partial(_only, token))
        bias = {FIRST: 100.0, token: -100.0}
        assert draw(row_of(grammar=grammar, logit_bias=bias, **way), frozenset()) == token


def _these(edits: list[Edit], *_: object) -> list[Edit]:
    return list(edits)


def _only(token: int, _: Sequence[int]) -> set[int]:
    return {token}


def test_each_sampler_forbids_tokens_beyond_a_mask_and_takes_a_longer_one(
    draw: Draw, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = {4: (1 << SECOND) | (1 << THIRD), 12: (1 << THIRD) | (1 << 95)}
    for size, bits in masks.items():
        edits: list[Edit] = [Allow(bits.to_bytes(size, "little"))]
        monkeypatch.setattr(SamplerState, "edits", partial(_these, edits))
        # A bias, so that no sampler takes the row for a greedy one.
        row = row_of(logit_bias={1: 1.0}, **way)
        assert draw(row, frozenset()) == (SECOND if size == 4 else THIRD)


class Succession(LogitsProcessor):
    """Makes the token after the last the likeliest by far, in two edits of a kind with another between them."""

    def __init__(self, part: int) -> None:
        self.part = part

    def edit(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> Edit | None:
        if self.part == 1:
            return Forbid({FIRST})
        return Add(array("q", [tokens[length - 1] + 1, FIRST]), array("f", [30.0, 10.0]))


def test_each_sampler_applies_a_processor_that_it_does_not_know(
    draw: Draw, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Request, "logits_processors", lambda request: tuple(map(Succession, range(3))))
    for tokens in ((*PROMPT, 40), (*PROMPT, 40, 7)):
        row = row_of(tokens=tokens, **way)
        assert not row.request.is_plain_greedy
        assert row.state
        assert row.state.reads_tokens
        assert draw(row, frozenset()) == tokens[-1] + 1


@pytest.mark.parametrize("token", [2**63, -(2**63) - 1])
def test_a_bias_of_no_64_bit_token_is_refused_by_its_field(token: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(logit_bias={token: 1.0})
    assert refused.value.field == "logit_bias"
