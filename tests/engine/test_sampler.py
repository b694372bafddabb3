"""Each token is drawn from exactly the requested distribution, in any batch."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import decant.engine.model.sampler as sampler_module
from decant.engine.block_hashes import hash_blocks, root_hash
from decant.engine.counter_rng import counter_uniform
from decant.engine.cpu.kernels import KERNELS
from decant.engine.cpu.sampler import SCORES_AT_ONCE
from decant.engine.engine import Engine
from decant.engine.model.backend import make_backend
from decant.engine.model.model import ModelConfig, ModelDevice, load
from decant.engine.model.sampler import PIECE, Sampler, TopToken, token_logprobs
from decant.engine.output import PromptLogprobs, SequenceFinished, Token
from decant.engine.plan import Row
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from decant.engine.sampler_state import SamplerState
from decant.engine.scheduler import Limits
from tests.engine import tiny

pytestmark = pytest.mark.slow

VOCAB = 48
EOS = frozenset({3})
PROMPT = (5, 7, 7, 11)
OUTPUT = (7, 2, 2, 2, 19)
DRAWS = 6_000

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


def top_tokens(logits: torch.Tensor) -> TopToken:
    return SAMPLER["sampler"].top_tokens(logits)


@pytest.fixture(params=["compiled", "torch"])
def each_sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, if there are kernels, and in tensor operations."""
    if request.param == "torch":
        monkeypatch.setitem(SAMPLER, "sampler", Sampler(SCORES_AT_ONCE))
    elif KERNELS is None:
        pytest.skip("this CPU has no AVX2, or no compiler was here")


either_way = pytest.mark.usefixtures("each_sampler")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(seed: int, count: int = 1, vocabulary: int = VOCAB) -> torch.Tensor:
    """Random logits under which the tokens that stand in the rows are likely, so that penalties matter."""
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 1.5
    logits[:, list({*PROMPT, *OUTPUT})] += 2.0
    return logits


def row(mix: dict[str, Any], output: Sequence[int] = OUTPUT, min_tokens: int = 0, **more: Any) -> Row:
    """A row with the sampling parameters ``mix``; not greedy by default."""
    sampling = SamplingParams(**{"temperature": 1.0, **mix, **more})
    stop = StopParams(min_tokens=min_tokens, stop_token_ids=frozenset({4}))
    request = Request("r", PROMPT, sampling=sampling, stop=stop)
    tokens = [*PROMPT, *output]
    return Row(request, tokens, len(tokens) - 1, len(tokens), array("i"), True, SamplerState(request))


def exact(drawn: Row, logits: torch.Tensor) -> np.ndarray:
    """The distribution as the documentation orders it, in float64 and one step after the other."""
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


def draws(drawn: dict[str, Any], logits: torch.Tensor, **options: Any) -> np.ndarray:
    """How often each token comes, over DRAWS seeds."""
    counts = np.zeros(VOCAB, dtype=int)
    for first in range(0, DRAWS, 2000):
        rows = [row(drawn, seed=seed, **options) for seed in range(first, first + 2000)]
        counts += np.bincount(sample(rows, logits.expand(len(rows), -1), EOS), minlength=VOCAB)
    return counts


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    """p-value of the counts under the shares, 0 when the impossible came; tokens expected fewer than 5 times are
    taken together."""
    if counts[shares == 0].any():
        return 0.0
    expected = shares * counts.sum()
    rare = expected < 5
    observed, bins = list(counts[~rare]), list(expected[~rare])
    if expected[rare].sum() > 0:
        observed.append(counts[rare].sum())
        bins.append(expected[rare].sum())
    if len(bins) == 1:
        return 1.0 if observed[0] == counts.sum() else 0.0
    return float(stats.chisquare(observed, bins, sum_check=False).pvalue)


# -- the distribution -------------------------------------------------------------------------------------------------


@either_way
@pytest.mark.parametrize("name", RANDOM)
def test_tokens_come_as_often_as_their_exact_probability_says(name):
    logits = logits_of(0)
    shares = exact(row(RANDOM[name]), logits[0])
    counts = draws(RANDOM[name], logits)
    assert chi_square(counts, shares) > 1e-3


def test_the_chi_square_would_notice_a_slightly_other_distribution():
    logits = logits_of(0)
    counts = draws({"temperature": 1.0}, logits)
    assert chi_square(counts, exact(row({}), logits[0])) > 1e-3
    for other in ({"temperature": 1.15}, {"min_p": 0.02}, {"top_k": 40}, {"frequency_penalty": 0.2}):
        assert chi_square(counts, exact(row(other), logits[0])) < 1e-6


@either_way
def test_no_stop_token_is_drawn_before_the_minimum_and_all_are_after_it():
    logits = logits_of(0)
    logits[0, [3, 4]] = 4.0
    held = draws({}, logits, min_tokens=len(OUTPUT) + 1)
    assert not held[[3, 4]].any()
    assert chi_square(held, exact(row({}, min_tokens=len(OUTPUT) + 1), logits[0])) > 1e-3
    free = draws({}, logits, min_tokens=len(OUTPUT))
    assert free[[3, 4]].all()
    assert chi_square(free, exact(row({}), logits[0])) > 1e-3


@either_way
@pytest.mark.parametrize("name", MIXES)
def test_a_draw_is_the_inverse_of_the_exact_cumulative_distribution(name, monkeypatch):
    """For any number that the generator could give; numbers at a border may fall on either side of it."""
    numbers = np.linspace(0.0005, 0.9995, 401)
    for seed in range(10):
        logits = logits_of(seed)
        cumulative = np.cumsum(exact(row(MIXES[name]), logits[0]))
        expected = np.searchsorted(cumulative, numbers, side="right")
        monkeypatch.setattr(sampler_module, "counter_uniform", lambda seed, *_: numbers[seed])
        got = sample([row(MIXES[name], seed=at) for at in range(len(numbers))], logits.expand(len(numbers), -1), EOS)
        clear = np.abs(cumulative[:, None] - numbers).min(0) > 1e-5
        assert clear.mean() > 0.9
        assert (np.array(got) == expected)[clear].all()


@either_way
@pytest.mark.parametrize("vocabulary", [PIECE, 4 * PIECE + 300])
@pytest.mark.parametrize("name", [*RANDOM, "nearly all", "many"])
def test_a_draw_from_a_large_vocabulary_is_that_inverse_too(vocabulary, name, monkeypatch):
    """Where sums are made in pieces. The likeliest stand in one of them, and one has nothing that may be drawn."""
    mix = {**RANDOM, "nearly all": {"top_p": 0.9999}, "many": {"top_k": 900, "top_p": 0.999}}[name]
    logits = logits_of(11, 1, vocabulary)
    logits[0, -200:] += 3.0
    logits[0, vocabulary // 4 : vocabulary // 2] -= 200.0
    shares = exact(row(mix), logits[0])
    cumulative = np.cumsum(shares)
    numbers = np.linspace(0.00005, 0.99995, 500)
    monkeypatch.setattr(sampler_module, "counter_uniform", lambda seed, *_: numbers[seed])
    rows = [row(mix, seed=at) for at in range(len(numbers))]
    got = np.array(sample(rows, logits.expand(len(rows), -1), EOS))
    assert shares[got].all()
    clear = np.abs(cumulative[np.clip(got, 1, None) - [[1], [0]]] - numbers).min(0) > 1e-5
    assert clear.mean() > 0.5
    assert (got == np.searchsorted(cumulative, numbers, side="right"))[clear].all()


@either_way
@pytest.mark.parametrize("narrow", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize(
    "mix", [{"repetition_penalty": 1e-42, "temperature": 0.5}, {"temperature": 1e-5, "logit_bias": {2: 100.0}}], ids=str
)
def test_what_is_rewarded_beyond_measure_is_drawn(mix, narrow):
    """Scores that a float could not hold are the highest that it can."""
    rows = [row({**mix, **narrow}, seed=seed) for seed in range(100)]
    logits = logits_of(0).abs() * 1e4
    drawn = set(sample(rows, logits.expand(100, -1), EOS))
    assert drawn == ({*PROMPT, *OUTPUT} if "repetition_penalty" in mix else {int(logits[0].argmax())})


@either_way
@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_only_repetition_looks_at_the_prompt(name):
    """Token 5 and 11 stand in the prompt alone."""
    plain, changed = (exact(row(mix, output=()), logits_of(1)[0]) for mix in ({}, RANDOM[name]))
    logits = logits_of(1)
    counts = draws(RANDOM[name], logits, output=())
    assert chi_square(counts, changed) > 1e-3
    assert np.allclose(plain, changed) == (name != "repetition")


@either_way
def test_equal_logits_at_the_edge_of_top_k_are_all_kept():
    logits = torch.zeros(1, VOCAB)
    counts = draws({"top_k": 3}, logits)
    assert counts.all()


# -- company ----------------------------------------------------------------------------------------------------------


@either_way
@pytest.mark.parametrize("vocabulary", [VOCAB, 3000])
def test_a_row_of_a_mixed_batch_gets_the_token_it_gets_alone(vocabulary):
    """However many rows go through the sampler's operations together."""
    rows = [
        row(mix, output=OUTPUT[:written], min_tokens=least, seed=seed)
        for seed, (mix, written, least) in enumerate(itertools.product(MIXES.values(), (0, 1, 5), (0, 3)))
    ]
    logits = logits_of(5, len(rows), vocabulary)
    together = sample(rows, logits.clone(), EOS)
    assert together == [sample([one], logits[at : at + 1].clone(), EOS)[0] for at, one in enumerate(rows)]
    assert vocabulary == VOCAB or len(rows) > SCORES_AT_ONCE // vocabulary
    backwards = sample(rows[::-1], logits.flip(0), EOS)
    assert together == backwards[::-1]


@pytest.mark.skipif(KERNELS is None, reason="this CPU has no AVX2, or no compiler was here")
@pytest.mark.parametrize("vocabulary", [1, 7, 8, PIECE - 1, PIECE + 1, 3000])
def test_bfloat16_and_more_threads_change_nothing(vocabulary):
    """A bfloat16 is a float32 too."""
    kinds = [row(mix, seed=seed).request.sampling for seed, mix in enumerate(MIXES.values()) if "logit_bias" not in mix]
    requests = [Request("r", (0,), sampling=kind) for kind in kinds]
    rows = [Row(one, [0, 0], 1, 2, array("i"), True, SamplerState(one)) for one in requests]
    logits = logits_of(5, len(rows), max(vocabulary, VOCAB))[:, :vocabulary].to(torch.bfloat16)
    expected = sample(rows, logits.float().contiguous(), frozenset())
    assert sample(rows, logits, frozenset()) == expected
    torch.set_num_threads(2)
    assert sample(rows, logits, frozenset()) == expected
    assert sample(rows, logits.mT.contiguous().mT, frozenset()) == expected


@either_way
def test_sampling_leaves_the_logits_as_they_were():
    logits = logits_of(2, len(MIXES))
    before = logits.clone()
    sample([row(mix) for mix in MIXES.values()], logits, EOS)
    assert torch.equal(logits, before)


@either_way
def test_a_draw_depends_on_seed_output_index_and_position_and_on_nothing_else():
    logits = logits_of(3)
    first = [sample([row({}, seed=seed)], logits, EOS)[0] for seed in range(200)]
    assert first == [sample([row({}, seed=seed)], logits, EOS)[0] for seed in range(200)]
    others = (
        [row({}, seed=seed + 200) for seed in range(200)],
        [row({}, seed=seed, output_index=1) for seed in range(200)],
        [row({}, seed=seed, output=OUTPUT[:-1]) for seed in range(200)],
    )
    assert all(sample(rows, logits.expand(200, -1), EOS) != first for rows in others)


def test_a_position_counts_output_tokens_only(monkeypatch):
    """So a request that starts over elsewhere with its output so far goes on with the same numbers."""
    batch: list[tuple[int, ...]] = []

    def number(*where: int) -> float:
        batch.append(where)
        return 0.5

    monkeypatch.setattr(sampler_module, "counter_uniform", number)
    sample([row({}, seed=6, output_index=2), row({}, seed=7, output=())], logits_of(0, 2), EOS)
    assert batch == [(6, 2, len(OUTPUT)), (7, 0, 0)]


def test_numbers_are_uniform_and_independent_along_each_of_their_three_coordinates():
    for line in (
        [counter_uniform(seed, 0, 0) for seed in range(5000)],
        [counter_uniform(1, index, 0) for index in range(5000)],
        [counter_uniform(1, 0, position) for position in range(5000)],
    ):
        values = np.array(line)
        assert len(set(line)) == len(line)
        assert values.min() > 0
        assert values.max() < 1
        assert stats.kstest(values, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05
    assert counter_uniform(1, 2, 3) not in (
        counter_uniform(2, 1, 3),
        counter_uniform(1, 3, 2),
        counter_uniform(3, 2, 1),
    )


# -- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_unchanged_logits():
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
def test_logprobs_of_a_row_do_not_depend_on_the_rows_beside_it(vocabulary: int) -> None:
    """Nor on how many alternatives those ask for, where many tokens are equally likely."""
    logits = logits_of(9, 70, vocabulary).mul(4).round().div(4)
    tokens, counts = [at % VOCAB for at in range(70)], [at % 21 for at in range(70)]
    run_alone = [token_logprobs(logits[at : at + 1], [tokens[at]], [counts[at]])[0] for at in range(70)]
    for size in (2, 3, 8, 31, 64, 70):
        for first in range(0, 70 - size + 1, 13):
            span = slice(first, first + size)
            assert token_logprobs(logits[span], tokens[span], counts[span]) == run_alone[span]


def test_equally_likely_alternatives_stand_in_the_order_of_their_ids() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [7, 30, 31]] = 1.0
    entries = token_logprobs(logits, [0, 7], [5, 2])
    assert [[token for token, _ in entry.top] for entry in entries] == [[7, 30, 31, 0, 1], [7, 30]]
    assert [token for token, _ in token_logprobs(logits[:1], [0], [VOCAB + 5])[0].top][:4] == [7, 30, 31, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.config("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def device(folder: Path) -> ModelDevice:
    return serve(folder)


def serve(folder: Path) -> ModelDevice:
    return load(ModelConfig(str(folder), dtype="float32", device="cpu", kv_bytes=2 << 20))


def engine_on(device: ModelDevice, budget: int = 64) -> Engine:
    return Engine(
        device, Limits(token_budget=budget, max_running=min(budget, 16), context_length=device.context_length)
    )


def full_pass(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of what follows each token, by transformers in one pass."""
    model: Any = tiny.reference(folder)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def events(engine: Engine, requests: Sequence[Request]) -> list[Any]:
    """All events of an engine, in order."""
    for request in requests:
        engine.add(request)
    items: list[Any] = []
    while engine.has_work:
        output = engine.step()
        items += [*output.prompt_logprobs, *output.tokens, *output.ended]
    engine.check_integrity()
    return items


def test_a_models_logprobs_are_those_of_a_full_pass(folder, device):
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
def test_prompt_logprobs_are_those_of_a_full_pass_in_any_chunking_and_with_a_cached_prefix(budget, folder, device):
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


# -- in an engine -----------------------------------------------------------------------------------------------------


def test_a_repetition_penalty_is_that_of_generate(folder, device):
    prompt = tiny.prompt(30, 3)
    model = tiny.reference(folder)
    out: Any = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), do_sample=False, max_new_tokens=25, repetition_penalty=1.7
    )
    sampling = SamplingParams(repetition_penalty=1.7)
    run = tiny.run(engine_on(device), [tiny.greedy("r", prompt, 25, sampling=sampling)])
    assert run.tokens["r"] == out[0, 30:].tolist()
    assert run.tokens["r"] != tiny.run(engine_on(device), [tiny.greedy("r", prompt, 25)]).tokens["r"]


def test_a_seed_gives_the_same_output_in_any_chunking_and_batch(device):
    def seeded(seed: int) -> Request:
        sampling = SamplingParams(temperature=1.2, top_p=0.9, seed=seed)
        return tiny.greedy(f"s{seed}", tiny.prompt(20 + seed, seed), 15, sampling=sampling)

    together = tiny.run(engine_on(device, 9), [seeded(seed) for seed in range(8)]).tokens
    assert len({tuple(tokens) for tokens in together.values()}) == 8
    for seed in range(8):
        assert tiny.run(engine_on(device, 512), [seeded(seed)]).tokens[f"s{seed}"] == together[f"s{seed}"]


def test_logits_that_are_not_finite_fail_their_own_sequence_and_no_other(folder):
    """One token's embedding is NaN: a sequence with it in its prompt fails, at any position."""
    device = serve(folder)
    prompts = {f"p{length}": tiny.prompt(length, length) for length in (3, 20, 45, 130)}
    poison = next(token for token in range(tiny.VOCAB) if all(token not in tokens for tokens in prompts.values()))
    clean = tiny.run(engine_on(device), [tiny.greedy(id, tokens, 10) for id, tokens in prompts.items()])
    assert not any(poison in tokens for tokens in clean.tokens.values())
    weights: Any = device.model
    with torch.no_grad():
        weights.get_input_embeddings().weight[poison] = float("nan")
    bad = {f"bad{at}": (*tiny.prompt(at, 77), poison, *tiny.prompt(4, 78)) for at in (0, 9, 60, 100)}
    mixed = [request for pair in zip(_greedy(bad), _greedy(prompts), strict=True) for request in pair]
    engine = engine_on(device, 32)
    for _ in range(3):  # again on blocks that carried what is not a number
        items = events(engine, mixed)
        ended = {event.id: event for event in items if isinstance(event, SequenceFinished)}
        assert {id for id, event in ended.items() if event.reason is FinishReason.FAILED} == set(bad)
        assert all("not finite" in ended[id].detail for id in bad)
        for id in prompts:
            written = [event.token for event in items if isinstance(event, Token) and event.id == id]
            assert written == clean.tokens[id]
        assert not any(event.id in bad for event in items if isinstance(event, Token))
    size = engine.pool.block_size
    found = {one.id for one in mixed if engine.pool.match(hash_blocks(root_hash(b""), one.token_ids, size))}
    assert found
    assert not found & set(bad), "what was computed beside it is found by nobody"


def _greedy(prompts: dict[str, tuple[int, ...]]) -> list[Request]:
    return [tiny.greedy(id, tokens, 10) for id, tokens in prompts.items()]


@either_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1, 1023, 1024, 1025, 5000])
def test_the_likeliest_is_the_first_of_the_top_tokens(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randn(200, vocabulary, generator=torch.Generator().manual_seed(vocabulary)).to(dtype)
    logits[:50] = logits[:50].round()  # many are the highest
    logits[50] = float("-inf")
    rows = [row({"temperature": 0.0}) for _ in range(200)]
    places = [(one == one.max()).nonzero()[0].item() for one in logits]
    assert sample(rows, logits, EOS) == places
    found = top_tokens(logits)
    assert torch.equal(found.scores.to(dtype), logits.amax(-1))
    assert found.tokens.tolist() == places
    assert top_tokens(logits.t().contiguous().t()).tokens.tolist() == places, "however they lie"
    assert top_tokens(logits[:0]).tokens.tolist() == []


@either_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("none", [float("nan"), float("-nan")])
def test_a_score_that_is_nan_is_found_at_any_index(none: float, dtype: torch.dtype) -> None:
    logits = torch.randn(2100, 2100, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits.fill_diagonal_(none)
    logits[:, 7] = float("inf")
    logits[7, 7] = none
    assert top_tokens(logits).scores.isnan().all()
    assert not top_tokens(logits).finite
    sound = torch.zeros(3, 2100, dtype=dtype)
    sound[1, 2099], sound[2] = float("inf"), float("-inf")
    assert top_tokens(sound).scores.tolist() == [0.0, float("inf"), float("-inf")]
    assert [top_tokens(sound[:count]).finite for count in range(4)] == [True, True, False, False]


@either_way
def test_in_a_mixed_batch_a_greedy_row_takes_its_known_token() -> None:
    logits = logits_of(3, 3)
    rows = [row({"temperature": 0.0}), row({"temperature": 1.0}, seed=5), row({"temperature": 0.0})]
    drawn = sample(rows, logits, EOS)
    assert sample(rows, logits, EOS, torch.tensor([11, 12, 13])) == [11, drawn[1], 13]
