from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decant.engine.model.sampler import token_logprobs
from decant.engine.output import PromptLogprobs, Token
from decant.engine.request import Request, SamplingParams, StopParams
from tests.engine import tiny
from tests.engine.sampler.harness import VOCAB, engine_on, events, logits_of

pytestmark = pytest.mark.slow


def test_logprobs_are_of_the_unchanged_logits():
    logits = logits_of(4, 4)
    normal = logits.double().log_softmax(-1)
    tokens, counts = [0, 9, 30, int(logits[3].argmax())], [0, 1, 5, VOCAB]
    for at, entry in enumerate(token_logprobs(logits, tokens, counts)):
        assert entry.token == tokens[at]
        assert entry.logprob == pytest.approx(float(normal[at, tokens[at]]), abs=1e-5)
        assert entry.rank == 1 + int((normal[at] > normal[at, tokens[at]]).sum())
        best = normal[at].topk(counts[at])
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert entry.rank == 1


@pytest.mark.parametrize("vocabulary", [VOCAB, 3000])
def test_logprobs_of_a_row_do_not_depend_on_other_rows(vocabulary: int) -> None:
    logits = logits_of(9, 70, vocabulary).mul(4).round().div(4)
    tokens, counts = [at % VOCAB for at in range(70)], [at % 21 for at in range(70)]
    run_alone = [token_logprobs(logits[at : at + 1], [tokens[at]], [counts[at]])[0] for at in range(70)]
    for size in (2, 3, 8, 31, 64, 70):
        for first in range(0, 70 - size + 1, 13):
            span = slice(first, first + size)
            assert token_logprobs(logits[span], tokens[span], counts[span]) == run_alone[span]


def test_equally_likely_alternatives_are_ordered_by_token_id() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [7, 30, 31]] = 1.0
    entries = token_logprobs(logits, [0, 7], [5, 2])
    assert [[token for token, _ in entry.top] for entry in entries] == [[7, 30, 31, 0, 1], [7, 30]]
    assert [token for token, _ in token_logprobs(logits[:1], [0], [VOCAB + 5])[0].top][:4] == [7, 30, 31, 0]


def full_pass(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    model: Any = tiny.reference(folder)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def test_logprobs_equal_those_of_a_full_pass(folder, device):
    prompt = tiny.prompt(40, 1)
    sampling = SamplingParams(temperature=1.5, seed=7, repetition_penalty=1.5, logit_bias={9: 3.0})
    request = Request("r", prompt, sampling=sampling, stop=StopParams(max_tokens=12, ignore_eos=True), logprobs=4)
    quiet = tiny.greedy("quiet", tiny.prompt(20, 2), 12)
    items = [event for event in events(engine_on(device), [quiet, request]) if isinstance(event, Token)]
    assert all(event.logprobs is None for event in items if event.id == "quiet")
    items = [event for event in items if event.id == "r"]
    normal = full_pass(folder, [*prompt, *(event.token for event in items)])
    for event in items:
        here, entry = normal[len(prompt) + event.position - 1], event.logprobs
        assert entry is not None
        assert entry.token == event.token
        assert entry.logprob == pytest.approx(float(here[event.token]), abs=1e-4)
        assert entry.rank == 1 + int((here > here[event.token]).sum())
        assert [token for token, _ in entry.top] == here.topk(4).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(here.topk(4).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("budget", [1, 7, 64, 4096])
def test_prompt_logprobs_equal_those_of_a_full_pass_in_any_chunking(budget, folder, device):
    prompt = tiny.prompt(150, 1)
    engine = engine_on(device, budget)
    events(engine, [tiny.greedy("first", prompt, 2)])
    items = events(engine, [tiny.greedy("r", prompt, 2, prompt_logprobs=3), tiny.greedy("other", prompt[:30], 9)])
    parts = [event for event in items if isinstance(event, PromptLogprobs)]
    assert {event.id for event in parts} == {"r"}
    assert parts[0].position == 1
    entries = [entry for event in parts for entry in event.entries]
    assert tuple(entry.token for entry in entries) == prompt[1:]
    normal = full_pass(folder, prompt)
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(normal[position, entry.token]), abs=1e-4)
        assert entry.rank == 1 + int((normal[position] > normal[position, entry.token]).sum())
        assert [token for token, _ in entry.top] == normal[position].topk(3).indices.tolist()
