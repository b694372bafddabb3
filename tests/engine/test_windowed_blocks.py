from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.engine.blocks import BlockPool
from decant.engine.engine import Engine
from decant.engine.errors import OutOfBlocks
from decant.engine.fake import FakeDevice
from decant.engine.kv_layout import FULL, KvFormat, KvLayout, LayerSpec, Window, WindowKind
from tests.engine.factories import (
    BLOCK,
    CONTEXT_LENGTH,
    OutputLog,
    export_sequence,
    import_sequence,
    make_device,
    make_engine,
    make_request,
    recompute_each_step,
    run,
    step_until,
)
from tests.engine.state_machine import GROUPS, Windows, play

SLIDING, CHUNKED = Window(WindowKind.SLIDING, 10), Window(WindowKind.CHUNKED, 12)
HELD_AT_ONCE = 5  # blocks of BLOCK tokens: a window of 10 or 12, and two more
MIXED = (FULL, SLIDING)
KINDS: list[Windows] = [(SLIDING,), (CHUNKED,), MIXED, (FULL, CHUNKED, SLIDING)]


def device_of(windows: Windows, num_blocks: int = 64) -> FakeDevice:
    device = make_device(num_blocks)
    device.windows = windows
    return device


def engine_of(windows: Windows, num_blocks: int = 64, budget: int = BLOCK) -> Engine:
    device = device_of(windows, num_blocks)
    engine = make_engine(device=device, budget=budget)
    engine.limits = engine.scheduler.limits = replace(engine.limits, context_length=device.context_length)
    return engine


def held_by_group(engine: Engine, id: str) -> list[int]:
    table = engine.sequences[id].block_table
    assert table is not None
    return [len(blocks) - freed for blocks, freed in zip(table.blocks, table.num_freed, strict=True)]


@pytest.mark.parametrize("windows", KINDS)
def test_a_long_sequence_holds_a_window_of_blocks(windows: Windows) -> None:
    """The pool holds one sequence of the context length, plus one block of each group."""
    request = make_request(tokens=60, max_tokens=24)
    most = sum(24 if window == FULL else HELD_AT_ONCE for window in windows)
    engine, log, held = engine_of(windows, most + len(windows)), OutputLog(), [0] * len(windows)
    engine.add(request)
    for _ in range(100):
        log.record(engine.step())
        engine.check_integrity()
        if "a" not in engine.sequences:
            break
        held = [max(pair) for pair in zip(held, held_by_group(engine, "a"), strict=True)]
    assert log["a"].text == recompute_each_step(device_of(windows, 96), request, CONTEXT_LENGTH).text
    for window, count in zip(windows, held, strict=True):
        assert count == 21 if window == FULL else 0 < count <= HELD_AT_ONCE


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 40),
    kind=st.sampled_from([WindowKind.SLIDING, WindowKind.CHUNKED]),
    tokens=st.integers(1, 80),
    budget=st.integers(1, 64),
)
def test_a_group_with_a_window_holds_at_most_that_window_and_a_chunk(
    size: int, kind: WindowKind, tokens: int, budget: int
) -> None:
    engine = engine_of((FULL, Window(kind, size)), budget=budget)
    engine.add(make_request(tokens=tokens, max_tokens=8))
    for _ in range(200):
        engine.step()
        if not engine.has_work:
            break
        assert held_by_group(engine, "a")[1] <= -(-size // BLOCK) + -(-budget // BLOCK) + 2
    assert not engine.has_work
    assert engine.load().held_blocks == 0


def test_a_full_model_frees_nothing_before_the_end() -> None:
    engine = engine_of((FULL,))
    engine.add(make_request(tokens=40, max_tokens=24))
    step_until(engine, lambda: engine.sequences["a"].num_output == 8)
    assert engine.blocks_of(["a"]) == 12


@pytest.mark.parametrize("windows", [(SLIDING,), MIXED])
def test_a_prefix_hit_needs_what_later_tokens_see(windows: Windows) -> None:
    engine = engine_of(windows, num_blocks=64)
    request = make_request("a", tokens=48, max_tokens=2)
    first = run(engine, request)
    hashes = engine.new_sequence(replace(request, id="c")).hashes(range(11), BLOCK)
    windowed = len(windows) - 1
    cached = {key: block for block, key in engine.pool.index.published.items()}
    unseen = [cached[windowed, block_hash] for block_hash in hashes[: (44 - 10 + 1) // BLOCK]]
    for block in unseen:
        engine.pool._cached.move_to_end(block, last=False)
    engine.pool._free += engine.pool._evict(len(unseen))
    run(engine, replace(request, id="c"), log=first)
    started = first["c"].started
    assert started is not None
    assert started.cached == 44
    assert first["c"].text == first["a"].text


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("evicted", [0, 7, 10])
def test_without_a_block_that_a_group_sees_the_hit_is_shorter(group: int, evicted: int) -> None:
    pool = BlockPool(64, BLOCK, MIXED)
    hashes = [bytes([index]) for index in range(11)]
    table = pool.allocate("a", 11)
    table.grow(11)
    for of in (0, 1):
        pool.publish(of, table.blocks[of], hashes)
    pool.index.remove([table.blocks[group][evicted]])
    found = pool.index.longest_prefix(hashes)
    # Full attention needs all blocks; the window at the end of 11 blocks sees 8 to 10.
    expected = 11 if group == 1 and evicted < 8 else evicted
    assert found.num_blocks == expected
    for of, (freed, blocks) in enumerate(found.groups):
        assert freed == pool.first_block(of, expected * BLOCK)
        assert list(blocks) == list(table.blocks[of][freed:expected])


def test_one_hash_finds_a_block_of_its_own_group() -> None:
    pool = BlockPool(4, BLOCK, (FULL, SLIDING))
    table = pool.allocate("a", 2)
    pool.publish(0, table.blocks[0], [b"x", b"y"])
    assert pool.index.longest_prefix([b"x", b"y"]).num_blocks == 0
    pool.publish(1, table.blocks[1], [b"x", b"y"])
    assert [list(blocks) for _, blocks in pool.index.longest_prefix([b"x", b"y"]).groups] == [
        list(blocks) for blocks in table.blocks
    ]


def test_all_groups_get_their_blocks_or_none_does() -> None:
    pool = BlockPool(7, BLOCK, (FULL, FULL, SLIDING))
    with pytest.raises(OutOfBlocks):
        pool.allocate("a", 3)
    pool.check_integrity(())
    assert pool.free_blocks == 7
    table = pool.allocate("a", 2)
    with pytest.raises(OutOfBlocks):
        table.grow(3)
    pool.check_integrity(["a"])
    assert [len(blocks) for blocks in table.blocks] == [2, 2, 2]


def test_a_handoff_sends_what_the_last_token_sees() -> None:
    for windows in ((SLIDING,), MIXED):
        sender, receiver = engine_of(windows), engine_of(windows)
        request = make_request("a", tokens=60, max_tokens=12, park_after=1)
        sender.add(request)
        log = step_until(sender, lambda sender=sender: "a" in sender.parked)  # type: ignore[misc]
        payload = export_sequence(sender, "a")
        sent = [[address.block for address, _, _ in payload.blocks if address.group == group] for group in (0, 1)]
        assert sent == ([[12, 13, 14], []] if len(windows) == 1 else [list(range(15)), [12, 13, 14]])
        import_sequence(receiver, request, payload)
        run(receiver, log=log)
        device = device_of(windows, 96)
        assert log["a"].text == recompute_each_step(device, replace(request, park_after=None), CONTEXT_LENGTH).text
        for engine in (sender, receiver):
            engine.check_integrity()
            assert engine.load().held_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("windows", GROUPS)
@pytest.mark.parametrize("seed", range(12))
def test_random_scripts_over_groups(seed: int, windows: Windows) -> None:
    play(seed, forks=seed % 3 == 0, windows=windows)


def spec(window: Window, heads: int = 1) -> LayerSpec:
    return LayerSpec(heads, 8, 8, window)


@pytest.mark.parametrize(
    ("pattern", "layers", "groups"),
    [
        ("F", 24, [24]),
        ("S", 5, [5]),
        ("SF", 24, [12, 12]),
        ("SSSF", 32, [8, 8, 8, 8]),
        ("SSSSSF", 26, [4, 4, 4, 4, 4, 4, 2]),
        ("SSSSSF", 62, [10, 10, 10, 10, 10, 10, 2]),
    ],
)
def test_layers_form_groups_of_about_equal_size(pattern: str, layers: int, groups: list[int]) -> None:
    specs = [spec(FULL if pattern[layer % len(pattern)] == "F" else SLIDING) for layer in range(layers)]
    layout = KvLayout(tuple(specs), 16, KvFormat(2))
    assert [len(group.layers) for group in layout.groups] == groups
    assert layout.block_bytes == max(groups) * 16 * 16 * 2
    for group in layout.groups:
        assert {specs[layer].window for layer in group.layers} == {group.window}
        assert [layout.offsets[layer] for layer in group.layers] == [
            index * 16 * 16 for index in range(len(group.layers))
        ]


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([FULL, SLIDING, CHUNKED])), min_size=1, max_size=40))
def test_every_layer_has_an_offset_of_its_own_in_a_group(kinds: list[tuple[int, Window]]) -> None:
    layout = KvLayout(tuple(spec(window, heads) for heads, window in kinds), 4, KvFormat(2))
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(kinds)))
    assert len(layout.groups) <= 8
    for group in layout.groups:
        end = 0
        for layer in group.layers:
            assert layout.layers[layer].window == group.window
            assert layout.offsets[layer] == end
            end += 4 * layout.layers[layer].slot_elements
        assert end <= layout.block_elements
