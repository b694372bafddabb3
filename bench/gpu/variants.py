"""Steps of a served model as they may also be computed: with dependent launches, with adapters."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

from bench import medians
from bench.adapter_steps import add_adapter, plan
from bench.gpu import shapes
from bench.gpu.serving import make_engine, request
from decant.engine.model.model import ModelDevice

RANK = 16


@dataclass(frozen=True)
class Compared:
    """Tokens of the same requests without dependent launches, with them, and without them again.

    ``changed`` counts requests of which some token is another one with them; ``unstable``, without them.
    """

    requests: int
    tokens: int
    changed: int
    unstable: int


def compare_dependent_launches(device: ModelDevice, requests: int, longest: int, output: int) -> Compared:
    """Serve requests of up to ``longest`` tokens thrice, through graphs of their own on the same weights."""
    from decant.engine.cuda import dependent_launch  # it needs triton

    runs = []
    for is_dependent in (False, True, False):
        with mock.patch.object(dependent_launch, "ENABLED", is_dependent):
            each = shapes.beside(device, requests * (-(-(longest + output) // device.block_size) + 1))
            runs.append(_tokens(each, requests, longest, output))
            del each
    before, with_them, after = runs
    return Compared(requests, sum(map(len, before.values())), _different(before, with_them), _different(before, after))


def _tokens(device: ModelDevice, requests: int, longest: int, output: int) -> Mapping[str, Sequence[int]]:
    engine = make_engine(device, requests)
    rng, found = random.Random(0), dict[str, list[int]]()
    for at in range(requests):
        engine.add(request(f"{at}", rng.randint(1, longest), output, device.vocab_size))
        found[f"{at}"] = []
    while engine.has_work:
        for token in engine.step().tokens:
            found[token.id].append(token.token)
    return found


def _different(one: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]]) -> int:
    return sum(one[name] != other[name] for name in one)


def adapter_steps(device: ModelDevice, sequences: int, context: int, counts: Sequence[int], runs: int) -> list[float]:
    """Milliseconds of a step of ``sequences`` with each number of adapters, of which 0 is one."""
    digests = [add_adapter(device, RANK, seed) for seed in range(max(counts))]
    plans = [plan(device, sequences, context, digests[:count]) for count in counts]
    return medians.in_turn([partial(device.run, each) for each in plans], runs)
