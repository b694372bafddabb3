from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decant.engine.backends import make_backend
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.model.sampler import Sampler
from decant.engine.plan import Row
from decant.engine.request import Request, SamplingParams, StopParams
from decant.engine.sampler_state import SamplerState
from decant.engine.scheduler import Limits

VOCAB = 48
EOS = frozenset({3})
PROMPT = (5, 7, 7, 11)
OUTPUT = (7, 2, 2, 2, 19)
MIXES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.4},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 5},
    "top-k beyond the vocabulary": {"top_k": 1000},
    "top-p": {"top_p": 0.6},
    "top-p of one token": {"top_p": 0.01},
    "min-p": {"min_p": 0.2},
    "min-p of one token": {"min_p": 1.0},
    "top-k, then top-p": {"top_k": 8, "top_p": 0.7},
    "all three, hot": {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.8},
    "repetition, rewarded": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": -0.7, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {2: 3.0, 9: -100.0, 30: 1.5}},
    "bias, then repetition": {"logit_bias": {7: 4.0, 5: -4.0}, "repetition_penalty": 2.0},
    "everything": {
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 2.0, 40: -2.0},
    },
    "greedy": {"temperature": 0.0},
    "greedy, penalised": {"temperature": 0.0, "repetition_penalty": 3.0, "frequency_penalty": 2.0},
    "greedy, biased": {"temperature": 0.0, "logit_bias": {17: 50.0}},
}


RANDOM = {name: mix for name, mix in MIXES.items() if mix.get("temperature") != 0.0}
SAMPLER: dict[str, Sampler] = {"sampler": make_backend(torch.device("cpu")).sampler}


def sample(
    rows: Sequence[Row], logits: torch.Tensor, eos: frozenset[int], greedy: torch.Tensor | None = None
) -> list[int]:
    return SAMPLER["sampler"].sample(rows, logits, eos, greedy)


both_samplers = pytest.mark.usefixtures("each_sampler")


def exact(drawn: Row, logits: torch.Tensor) -> np.ndarray:
    """Compute the documented distribution in float64, step by step."""
    sampling, stop = drawn.request.sampling, drawn.request.stop
    scores: np.ndarray = logits.double().numpy().copy()
    output = drawn.tokens[drawn.request.prompt_len :]
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if len(output) < stop.min_tokens:
        scores[sorted(stop.stop_token_ids | EOS)] = -np.inf
    for token in set(drawn.tokens):
        scores[token] *= sampling.repetition_penalty ** (-1 if scores[token] > 0 else 1)
    for token in set(output):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(output).count(token)
    if sampling.temperature == 0:
        run_alone: np.ndarray = np.eye(len(scores))[scores.argmax()]
        return run_alone
    scores /= sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores[scores < np.sort(scores)[-sampling.top_k]] = -np.inf
    shares: np.ndarray = np.exp(scores - scores.max())
    shares /= shares.sum()
    order = np.argsort(-shares)
    kept = np.cumsum(shares[order]) - shares[order] < sampling.top_p
    shares[order[~kept]] = 0
    shares[shares < sampling.min_p * shares.max()] = 0
    shares /= shares.sum()
    return shares


def logits_of(seed: int, count: int = 1, vocabulary: int = VOCAB) -> torch.Tensor:
    """Logits that make the rows' tokens likely, so that penalties change them."""
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 1.5
    logits[:, list({*PROMPT, *OUTPUT})] += 2.0
    return logits


def row(mix: dict[str, Any], output: Sequence[int] = OUTPUT, min_tokens: int = 0, **more: Any) -> Row:
    sampling = SamplingParams(**{"temperature": 1.0, **mix, **more})
    stop = StopParams(min_tokens=min_tokens, stop_token_ids=frozenset({4}))
    request = Request("r", PROMPT, sampling=sampling, stop=stop)
    tokens = [*PROMPT, *output]
    return Row(request, tokens, len(tokens) - 1, len(tokens), (array("i"),), True, SamplerState(request))


def serve(folder: Path) -> ModelDevice:
    return load(ModelConfig(str(folder), dtype="float32", device="cpu", kv_bytes=2 << 20))


def engine_on(device: ModelDevice, budget: int = 64) -> Engine:
    return Engine(
        device, Limits(token_budget=budget, max_running=min(budget, 16), context_length=device.context_length)
    )


def events(engine: Engine, requests: Sequence[Request]) -> list[Any]:
    for request in requests:
        engine.add(request)
    items: list[Any] = []
    while engine.has_work:
        output = engine.step()
        items += [*output.prompt_logprobs, *output.tokens, *output.ended]
    engine.check_integrity()
    return items
