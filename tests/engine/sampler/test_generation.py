from __future__ import annotations

from typing import Any

import pytest
import torch

from decant.engine.block_hashes import hash_blocks, root_hash
from decant.engine.output import SequenceFinished, Token
from decant.engine.request import FinishReason, Request, SamplingParams
from tests.engine import tiny, tiny_configs
from tests.engine.sampler.harness import engine_on, events, serve

pytestmark = pytest.mark.slow


def test_the_repetition_penalty_is_that_of_generate(folder, device):
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


def test_logits_that_are_not_finite_fail_only_their_sequence(folder):
    device = serve(folder)
    prompts = {f"p{length}": tiny.prompt(length, length) for length in (3, 20, 45, 130)}
    poison = next(
        token for token in range(tiny_configs.VOCAB) if all(token not in tokens for tokens in prompts.values())
    )
    clean = tiny.run(engine_on(device), [tiny.greedy(id, tokens, 10) for id, tokens in prompts.items()])
    assert not any(poison in tokens for tokens in clean.tokens.values())
    weights: Any = device.model
    with torch.no_grad():
        weights.get_input_embeddings().weight[poison] = float("nan")
    bad = {f"bad{at}": (*tiny.prompt(at, 77), poison, *tiny.prompt(4, 78)) for at in (0, 9, 60, 100)}
    mixed = [request for pair in zip(_greedy(bad), _greedy(prompts), strict=True) for request in pair]
    engine = engine_on(device, 32)
    for _ in range(3):  # again on blocks that had NaN
        items = events(engine, mixed)
        ended = {event.id: event for event in items if isinstance(event, SequenceFinished)}
        assert {id for id, event in ended.items() if event.reason is FinishReason.FAILED} == set(bad)
        assert all("not finite" in ended[id].detail for id in bad)
        for id in prompts:
            written = [event.token for event in items if isinstance(event, Token) and event.id == id]
            assert written == clean.tokens[id]
        assert not any(event.id in bad for event in items if isinstance(event, Token))
    size = engine.pool.block_size
    found = {
        one.id
        for one in mixed
        if engine.pool.index.longest_prefix(hash_blocks(root_hash(b""), one.token_ids, size)).num_blocks
    }
    assert found
    assert not found & set(bad), "a failed prompt is not in the prefix cache"


def _greedy(prompts: dict[str, tuple[int, ...]]) -> list[Request]:
    return [tiny.greedy(id, tokens, 10) for id, tokens in prompts.items()]
