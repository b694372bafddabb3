"""Log-probabilities of given tokens, and embeddings: equal to transformers', and the same bits however a step runs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from decant.engine.engine import Engine
from decant.engine.errors import InvalidRequest
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.plan import Device
from decant.engine.request import EmbeddingParams, Pooling, Request, StopParams
from decant.engine.scheduler import Limits
from tests.engine import tiny
from tests.engine.factories import make_device, make_engine, make_request, prompt

ONE = StopParams(max_tokens=1)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two layouts: full attention with fused layers, and sliding windows with norms of their own."""
    return {kind: tiny.save(tiny.config(kind), tmp_path_factory.mktemp(kind)) for kind in ("llama", "gemma3_text")}


def loaded(folder: Path) -> ModelDevice:
    return load(ModelConfig(str(folder), dtype="float32", kv_bytes=4 << 20, block_size=8))


def engine_on(device: Device, budget: int = 512, running: int = 8) -> Engine:
    limits = Limits(token_budget=budget, max_running=min(budget, running), context_length=128)
    return Engine(device, limits)


def embedded(engine: Engine, *requests: Request) -> dict[str, list[float]]:
    for request in requests:
        engine.add(request)
    values: dict[str, list[float]] = {}
    while engine.has_work:
        for part in engine.step().embeddings:
            assert part.id not in values
            values[part.id] = array("f", part.values).tolist()
    engine.check_integrity()
    return values


def scored(engine: Engine, *requests: Request) -> dict[str, dict[int, float]]:
    """Log-probability by position, of each request."""
    for request in requests:
        engine.add(request)
    found: dict[str, dict[int, float]] = {request.id: {} for request in requests}
    while engine.has_work:
        for part in engine.step().prompt_logprobs:
            entries = {part.position + index: entry.logprob for index, entry in enumerate(part.entries)}
            assert not entries.keys() & found[part.id].keys()
            found[part.id].update(entries)
    engine.check_integrity()
    return found


def embed(id: str, tokens: Sequence[int], pooling: Pooling, **options: object) -> Request:
    params = EmbeddingParams(pooling, **options)  # type: ignore[arg-type]
    return Request(id, tuple(tokens), stop=ONE, embedding=params)


def score(id: str, tokens: Sequence[int], first: int) -> Request:
    return Request(id, tuple(tokens), stop=ONE, prompt_logprobs=0, prompt_logprobs_from=first)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_scores_and_embeddings_equal_those_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32).eval()
    tokens = tiny.prompt(70, 3)
    with torch.no_grad():
        out = model(input_ids=torch.tensor([tokens]), use_cache=False)
        hidden = model.base_model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0].double()
    device = loaded(folders[kind])
    engine = engine_on(device, budget=24)
    logprobs = out.logits[0].double().log_softmax(-1)
    expected = {at: logprobs[at - 1, tokens[at]].item() for at in range(50, 70)}
    assert scored(engine, score("s", tokens, 50))["s"] == pytest.approx(expected, abs=2e-5)
    mean, last = hidden.mean(0), hidden[-1]
    found = embedded(
        engine,
        embed("mean", tokens, Pooling.MEAN),
        embed("last", tokens, Pooling.LAST),
        embed("short", tokens, Pooling.MEAN, dimensions=7),
        embed("raw", tokens, Pooling.LAST, normalize=False),
    )
    assert found["mean"] == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)
    assert found["last"] == pytest.approx((last / last.norm()).tolist(), abs=1e-5)
    assert found["short"] == pytest.approx((mean[:7] / mean[:7].norm()).tolist(), abs=1e-5)
    assert found["raw"] == pytest.approx(last.tolist(), rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_scores_and_embeddings_have_the_same_bits_in_any_batch_and_chunking(folders: dict[str, Path]) -> None:
    device = loaded(folders["llama"])
    requests = [
        *(embed(f"mean-{length}", tiny.prompt(length, length), Pooling.MEAN) for length in (1, 23, 90)),
        *(embed(f"last-{length}", tiny.prompt(length, length), Pooling.LAST) for length in (1, 23, 90)),
    ]
    texts = [score(f"score-{length}", tiny.prompt(length, length), length // 2 + 1) for length in (2, 23, 90)]
    alone = {request.id: embedded(engine_on(device), request)[request.id] for request in requests}
    alone_scores = {request.id: scored(engine_on(device), request)[request.id] for request in texts}
    for budget in (7, 64, 512):
        assert embedded(engine_on(device, budget), *requests) == alone
        assert scored(engine_on(device, budget), *texts) == alone_scores


@pytest.mark.slow
def test_scores_equal_the_logprobs_of_generated_tokens(folders: dict[str, Path]) -> None:
    device, tokens = loaded(folders["llama"]), tiny.prompt(30, 1)
    engine, generated = engine_on(device), list[tuple[int, float]]()
    stop = StopParams(max_tokens=12, ignore_eos=True)
    engine.add(Request("g", tokens, stop=stop, logprobs=0))
    while engine.has_work:
        generated += [(token.token, token.logprobs.logprob) for token in engine.step().tokens if token.logprobs]
    whole = (*tokens, *(token for token, _ in generated))
    found = scored(engine_on(device), score("s", whole, len(tokens)))["s"]
    assert [found[at] for at in range(30, 42)] == [logprob for _, logprob in generated]


@pytest.mark.parametrize("budget", [3, 64])
def test_tokens_before_the_first_scored_one_may_come_from_the_prefix_cache(budget: int) -> None:
    shared, engine = prompt(21), make_engine(budget=budget)
    whole = [make_request(f"c{n}", (*shared, n, n + 1), 1, prompt_logprobs=0) for n in range(3)]
    expected = scored(make_engine(), *whole)
    planned = engine.scheduler.pool
    computed: list[int] = []
    for request in whole:
        engine.add(score(request.id, request.token_ids, len(shared)))
        found: dict[int, float] = {}
        tokens = 0
        while engine.has_work:
            output = engine.step()
            tokens += output.num_tokens
            for part in output.prompt_logprobs:
                found.update({part.position + at: entry.logprob for at, entry in enumerate(part.entries)})
        computed.append(tokens)
        assert found == {at: expected[request.id][at] for at in (21, 22)}
    assert computed == [23, 3, 3], "blocks of 4: 20 of the 21 tokens are cached"
    assert planned is engine.pool
    engine.check_integrity()


def test_a_preempted_embedding_is_computed_again_and_returned_once() -> None:
    tokens = [prompt(30, start) for start in range(3)]
    requests = [make_request(f"e{n}", ids, 1, embedding=EmbeddingParams(Pooling.MEAN)) for n, ids in enumerate(tokens)]
    expected = {request.id: embedded(make_engine(), request)[request.id] for request in requests}
    engine = make_engine(24, budget=5)
    engine.add(make_request("w", 8, 60))
    for _ in range(30):
        engine.step()
    assert embedded(engine, *requests) == expected


@pytest.mark.parametrize("dimensions", [0, 9])
def test_a_number_of_dimensions_that_the_model_lacks_is_refused(dimensions: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_engine().add(make_request("e", 6, 1, embedding=EmbeddingParams(dimensions=dimensions)))
    assert (refused.value.field, refused.value.value) == ("dimensions", dimensions)


def test_an_embedding_is_refused_where_the_device_returns_none_and_with_more_than_one_token() -> None:
    device = make_device()
    device.embedding_size = 0
    with pytest.raises(InvalidRequest, match="pooling: unset on this device"):
        make_engine(device=device).add(make_request("e", 6, 1, embedding=EmbeddingParams()))
    with pytest.raises(InvalidRequest, match="max_tokens: 1 with an embedding, got 2"):
        make_request("e", 6, 2, embedding=EmbeddingParams())
