from __future__ import annotations

import pytest

from bench.conversations import arrivals
from bench.placement import simulate

Figures = dict[str, dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def figures() -> Figures:
    return simulate(prompts=250, rate=40, workers=4)


@pytest.mark.slow
def test_prefix_aware_placement_raises_hits_and_lowers_ttft_where_prefixes_are_shared(figures: Figures) -> None:
    found = figures["conversations"]
    for other in ("round robin", "random"):
        assert found["placement"]["cached_share"] > 1.2 * found[other]["cached_share"]
        assert found["placement"]["mean_ttft_ms"] < 0.8 * found[other]["mean_ttft_ms"]
        assert found["placement"]["p99_ttft_ms"] < found[other]["p99_ttft_ms"]


@pytest.mark.slow
def test_prefix_aware_placement_is_never_much_worse(figures: Figures) -> None:
    for load in figures.values():
        for other in ("load alone", "round robin", "random"):
            assert load["placement"]["cached_share"] >= 0.95 * load[other]["cached_share"]
            assert load["placement"]["mean_ttft_ms"] < 1.1 * load[other]["mean_ttft_ms"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures() -> None:
    assert simulate(prompts=40, rate=40, workers=2) == simulate(prompts=40, rate=40, workers=2)


def test_conversations_share_and_documents_do_not() -> None:
    def shared(share: float) -> float:
        load = arrivals(200, 50, share, seed=1)
        assert len(load) == 200
        assert [arrival.at for arrival in load] == sorted(arrival.at for arrival in load)
        names = [name for arrival in load for name in arrival.prefix.hashes(16)]
        return 1 - len(set(names)) / len(names)

    assert shared(1.0) > 0.5
    assert shared(0.0) == 0
