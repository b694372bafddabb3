from __future__ import annotations

import itertools
import math
import subprocess
import sys
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.engine.block_hashes import hash_blocks, root_hash
from decant.engine.counter_rng import counter_uniform
from decant.engine.fake import CANDIDATES, WEIGHTS, FakeDevice, candidates, slot_bytes
from decant.engine.kv_layout import KvFormat, KvLayout, LayerSpec
from decant.engine.plan import Row, StepPlan
from decant.engine.request import SamplingParams, StopParams
from decant.engine.sampler_state import SamplerState
from decant.engine.scheduler import STEPS_PER_PRIORITY, priority_key
from decant.engine.sequence import Sequence as EngineSequence
from tests.engine import p_values
from tests.engine.factories import make_device, make_engine, make_request, prompt, run, step_until

ROOT = Path(__file__).parents[2]

WITHOUT_TORCH = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
names = "blocks counter_rng costs engine errors exports fake forced_tokens inspection kv_layout logits_processors"
names += " loop output plan request sampler_state scheduler sequence transfer"
for name in names.split():
    importlib.import_module(f"decant.engine.{name}")

import asyncio
from decant.engine.engine import Engine
from decant.engine.output import Token
from decant.engine.fake import FakeDevice
from decant.engine.request import Request, StopParams
from tests.engine.streams import Streams

async def main():
    async with Streams(Engine(FakeDevice(num_blocks=8, block_size=4, vocab_size=512))) as streams:
        request = Request("a", (1, 2, 3), stop=StopParams(max_tokens=8))
        return [event.token async for event in streams.generate(request) if isinstance(event, Token)]

print(*asyncio.run(main()))
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""


def test_the_engine_runs_on_a_fake_device_without_torch() -> None:
    script = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    here = run(make_engine(), make_request("a", (1, 2, 3)))["a"].text
    assert [int(token) for token in done.stdout.split()] == here, "and writes the same in another process"


# -- draws ------------------------------------------------------------------------------------------------------

PINNED = [0.7945189032113017, 0.9975377869352121, 0.13156292152188354, 0.016975158880435548, 0.8888740842899036]
SEEDS, INDEXES, POSITIONS = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**40)


@settings(deadline=None, max_examples=150)
@given(SEEDS, INDEXES, POSITIONS)
def test_a_draw_is_strictly_between_0_and_1_and_repeatable(seed: int, index: int, position: int) -> None:
    assert 0.0 < counter_uniform(seed, index, position) < 1.0
    assert counter_uniform(seed, index, position) == counter_uniform(seed, index, position)


def test_draws_are_pinned() -> None:
    """Another release may continue an output, so it has to draw the same tokens."""
    arguments = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 2**32 - 1, 2**40)]
    assert [counter_uniform(*each) for each in arguments] == PINNED


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_draws_are_uniform_and_uncorrelated_along_each_argument(argument: int) -> None:
    def draw(n: int) -> float:
        arguments = [11, 2, 5]
        arguments[argument] = n
        return counter_uniform(*arguments)

    numbers = [draw(n) for n in range(4000)]
    assert p_values.of_uniform(numbers) > 1e-3
    assert p_values.of_correlation(numbers[:-1], numbers[1:]) > 1e-3


def test_the_arguments_of_a_draw_are_not_confused_with_each_other() -> None:
    grid = list(itertools.product(range(12), repeat=3))
    assert len({counter_uniform(*each) for each in grid}) == len(grid)


# -- hashes -----------------------------------------------------------------------------------------------------


def test_a_hash_depends_on_all_tokens_before_it_and_the_salt() -> None:
    chains = []
    for salt, tokens in itertools.product((b"", b"a", b"b"), itertools.product((1, 2), repeat=4)):
        first, second = hash_blocks(root_hash(salt), tokens, 2)
        chains.append(((salt, tokens[:2]), first))
        chains.append(((salt, tokens), second))
        assert hash_blocks(first, tokens[2:], 2) == [second], "a chain goes on where it ended"
    meanings = dict(chains)
    assert len(set(meanings.values())) == len(meanings), "other tokens, another hash"
    assert all(meanings[key] == block_hash for key, block_hash in chains), "the same tokens, the same hash"


def test_a_block_is_not_confused_with_a_shorter_or_wider_one() -> None:
    root = root_hash(b"")
    blocks = [(0,), (1,), (1, 0), (0, 1), (1, 2), *((2**bits,) for bits in (8, 16, 31))]
    assert len({hash_blocks(root, tokens, len(tokens))[0] for tokens in blocks}) == len(blocks)
    assert hash_blocks(root, (1, 0, 1), 2) == hash_blocks(root, (1, 0), 2), "only full ones have a hash"


def test_the_chain_of_a_sequence_grows_with_it() -> None:
    sequence = EngineSequence(make_request("a", 10), (0.0, 1), 0.0)
    early = sequence.hashes(range(2), 4)
    assert len(early) == 2
    sequence.tokens += [1, 2, 3]
    assert sequence.hashes(range(3), 4)[:2] == early
    assert sequence.hashes(range(1), 4) == early[:1], "never more than was asked for"
    assert sequence.hashes(range(2, 3), 4) == sequence.hashes(range(3), 4)[2:]


# -- policy -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 10**6), st.integers(-1000, 1000), st.integers(-1000, 1000), st.integers(1, 10**6))
def test_a_level_of_priority_is_worth_a_fixed_number_of_steps(step: int, mine: int, other: int, later: int) -> None:
    first, second = priority_key(step, 1, mine), priority_key(step + later, 2, other)
    assert (second < first) is ((other - mine) * STEPS_PER_PRIORITY > later)


def test_equal_priorities_run_first_come_first_served() -> None:
    orders = [priority_key(5, arrival, 3) for arrival in range(10)]
    assert orders == sorted(orders)


# -- the fake ---------------------------------------------------------------------------------------------------


def distribution(device: FakeDevice, **sampling: Any) -> Counter[int]:
    requests = [make_request("a", 5, 1, sampling=SamplingParams(seed=seed, **sampling)) for seed in range(3000)]
    blocks = (array("i", [0, 1]),)
    rows = tuple(Row(one, one.token_ids, 0, 5, blocks, True, SamplerState(one)) for one in requests)
    return Counter(token for token in device.run(StepPlan(rows, 5 * len(rows))).sampled if token is not None)


def exact(temperature: float = 1.0, keep: int = CANDIDATES) -> list[float]:
    weights = [math.exp(-rank * math.log(2) / temperature) for rank in range(keep)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "shares"),
    [
        ({"temperature": 1.0}, exact()),
        ({"temperature": 3.0}, exact(3.0)),
        ({"temperature": 1.0, "top_k": 3}, exact(keep=3)),
        ({"temperature": 1.0, "top_p": 0.9}, exact(keep=4)),
        ({"temperature": 1.0, "min_p": 0.2}, exact(keep=3)),
        ({"temperature": 1.0, "output_index": 4}, exact()),
    ],
)
def test_the_fake_draws_from_its_exact_distribution(sampling: dict[str, Any], shares: list[float]) -> None:
    device = make_device(8)
    found = distribution(device, **sampling)
    ranked = run(make_engine(device=device), make_request("a", 5, 1, logprobs=CANDIDATES))["a"].logprobs[0]
    assert ranked is not None
    counts = [found.pop(token, 0) for token, _ in ranked.top[: len(shares)]]
    assert not found, "tokens that were cut off were drawn"
    common = [rank for rank, share in enumerate(shares) if share * sum(counts) >= 5]
    rest = [sum(counts) - sum(counts[rank] for rank in common), 1 - sum(shares[rank] for rank in common)]
    observed = [*(counts[rank] for rank in common), *([rest[0]] if rest[1] > 1e-9 else [])]
    ideal = [*(shares[rank] for rank in common), *([rest[1]] if rest[1] > 1e-9 else [])]
    assert p_values.of_counts(observed, [share * sum(observed) for share in ideal]) > 1e-3


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(CANDIDATES, 600))
def test_a_fake_distribution_names_distinct_tokens_of_the_vocabulary(total: int, vocabulary: int) -> None:
    seen = candidates(total, vocabulary)
    assert len(set(seen)) == CANDIDATES
    assert all(0 <= token < vocabulary for token in seen)
    assert sum(map(math.exp, WEIGHTS)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("slot", range(10))
def test_a_flipped_byte_in_a_held_block_changes_the_fakes_next_tokens(slot: int) -> None:
    undisturbed = run(make_engine(), make_request("a", 10))["a"].text
    engine = make_engine()
    engine.add(make_request("a", 10))
    log = step_until(engine, lambda: engine.steps == 2)
    table = engine.scheduler.running[0].block_table
    assert table is not None
    engine.device.read(table.blocks[0][slot // 4])[slot % 4 * 8 + slot % 8] ^= 1
    text = run(engine, log=log)["a"].text
    assert text[:2] == undisturbed[:2]
    assert text[2] != undisturbed[2]


def test_a_slot_of_the_fake_depends_on_its_token_position_and_previous_slot() -> None:
    first, other = slot_bytes(1, 0, b""), slot_bytes(2, 0, b"")
    slots = [slot_bytes(5, 3, first), slot_bytes(6, 3, first), slot_bytes(5, 4, first), slot_bytes(5, 3, other)]
    assert len({first, other, *slots}) == 6


def test_the_fakes_output_depends_on_every_token_and_its_position() -> None:
    texts = {tuple(run(make_engine(), make_request("a", tokens, 4))["a"].text) for tokens in variants()}
    assert len(texts) == len(variants())


def variants() -> list[tuple[int, ...]]:
    base = prompt(6)
    changed = [(*base[:at], base[at] + 1, *base[at + 1 :]) for at in range(6)]
    return [base, *changed, *((*base[at:], *base[:at]) for at in range(1, 6)), base[:5]]


def test_a_fake_vocabulary_with_one_allowed_token_works() -> None:
    stop = StopParams(max_tokens=4, min_tokens=2, stop_token_ids=frozenset(range(511)))
    log = run(make_engine(), make_request("one", stop=stop), make_request("other", 4))
    assert log["one"].ended is not None
    assert log["other"].text == run(make_engine(), make_request("other", 4))["other"].text


# -- layout -----------------------------------------------------------------------------------------------------


def test_a_block_is_one_run_across_all_layers() -> None:
    layout = KvLayout((LayerSpec(2, 4, 4), LayerSpec(1, 8, 2)), block_size=16, format=KvFormat(2))
    assert layout.offsets == (0, 256)
    assert (layout.block_elements, layout.block_bytes) == (416, 832)
