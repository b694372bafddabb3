from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence, Set

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from decant.engine.blocks import BlockPool, BlockTable
from decant.engine.costs import StepCostModel
from decant.engine.engine import Engine
from decant.engine.errors import OutOfBlocks
from decant.engine.request import FinishReason
from decant.engine.scheduler import STEPS_PER_PRIORITY
from tests.engine import properties
from tests.engine.factories import OutputLog, evict_all, make_engine, make_request, prompt, run, step_until
from tests.engine.state_machine import CONTEXT_LENGTH, COSTS, World, play, random_request

ACTIONS: tuple[tuple[int, Callable[[World, int, int], object]], ...] = (
    (6, lambda world, n, more: list(map(world.step, [n % 2] * (1 + more % 4)))),
    (2, lambda world, n, more: world.add(n % 2, random_request(random.Random(256 * n + more), CONTEXT_LENGTH))),
    (2, lambda world, n, more: world.cancel(n)),
    (1, lambda world, n, more: world.park(n)),
    (1, lambda world, n, more: world.resume(n)),
    (3, lambda world, n, more: world.add(n % 2, random_request(random.Random(256 * n + more), 16), 2 + more % 2)),
    (1, lambda world, n, more: world.finalize_running(n)),
    (3, lambda world, n, more: world.open(n)),
    (2, lambda world, n, more: world.push(n, 1 + more % 3)),
    (3, lambda world, n, more: [act(n) for act in (world.finalize, world.join)[: 1 + more % 2]]),
    (1, lambda world, n, more: world.give_up(n, by_cancel=more % 2 == 1)),
)
"""Weights, and actions with two numbers that choose their details."""

RESUMED_AFTER_ITS_COMMIT = bytes.fromhex(
    "22484c95b1ccebf2ffc9f184586692d4ea70147d8794a0adb0c4dadaec14a22028616183bad2e2e5f3fd44a5caec3f4b7600"
    "7401aabbbfdb000e1f25565e8fa6ade0e1fb8846b6ca427db160d952192f68c23a5b5c8e02091b1e5a627e819b9ca9bec1d4"
    "f2fb3b71a5a96645214e2942d86577b9279aafe0b32e676c8d0e90be9105953aff2ea277a9d86a1fc0d51a3d2a6b8ba357a7"
    "f816386c4c178ea4c5df09203781a4aab60cbf9caee95cea0b367f9b2326d036486fdc49fe9899ea05061011132848566a76"
    "7a7c8198acbed1e2e7f7042a35474b5c5e8d8d95d3d8ecf2fd689a016f7c8ba7b1b8cecee63cbcbfdb037b794a905c202319"
    "a21241b8fd6502060b0d18181a212223303444444b4d52555a5e5f6063646f7f7f869095989ca9b0b5bdc7cfddeceef3fcff"
)
"""Actions after which two outputs of a request, whose committed move was cancelled, can be moved again."""

GROWN_BESIDE_ITS_FORK = bytes.fromhex(
    "3ff52f93add5ed4f6c8bac177a828ec7daf4a48bc83255040a6a0f585ff1087b329baec9fc98d34d29b0e04a637481a2dbf1"
    "4a4f6e72dde0d609c81a5ec4ff3fb9c6075cbcdd2a5a98cb426a8a9eaaafb4e4e47e9699ad1634364cbfd4743f6790929da1"
    "f3721f3375add0fc02102840445d74e7eaf7f7fdcdd5870378b7c4f1a4dd04b2c136715e73ce91ae4d5c7fd53d8ccb203055"
    "91e0161a44bf9f2995f9c3e2b6f80f267be1aa336568d3a544bc9eeb216596c6f334e94ecdd3ff3795f8aaf8d5050f624470"
    "a79a5f35ff1f121091c9064667b7bfee0a12162a2e384a4b9aa5b9da0067d5e41240d4e30c0ec10598dce775bb171b1f2424"
    "2e2f363643686c6c6e7173787e848789a6afb6c1c8cadcf01f32474863686e777981828a9696a9adc1c6eef62228586f92c4"
)
"""Actions after which a sequence has grown so much before its fork starts that the memory can't hold both."""


@pytest.mark.slow
@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    budget=st.sampled_from([1, 3, 6, 16]),
    running=st.sampled_from([1, 2, 4]),
    costs=st.sampled_from(COSTS),
    absent=st.sets(st.integers(2, len(ACTIONS) - 1)),
    drawn=st.binary(min_size=300, max_size=300),
)
@example(budget=1, running=4, costs=StepCostModel(0.0, 0.0, 0.0, 0.0), absent=set(), drawn=GROWN_BESIDE_ITS_FORK)
@example(budget=1, running=4, costs=StepCostModel(0.0, 0.1, 0.0, 0.002), absent={2, 8}, drawn=RESUMED_AFTER_ITS_COMMIT)
def test_nothing_leaks_and_all_end_as_if_alone_after_any_actions(
    budget: int, running: int, costs: StepCostModel, absent: Set[int], drawn: bytes
) -> None:
    """Play 100 actions of three bytes each; the history lacks those in ``absent``."""
    world = World(budget, running, costs)
    actions = [action for place, (weight, action) in enumerate(ACTIONS) if place not in absent for _ in range(weight)]
    for kind, n, more in zip(drawn[::3], drawn[1::3], drawn[2::3], strict=True):
        actions[kind % len(actions)](world, n, more)
        world.check()
    world.finish()


@pytest.mark.slow
def test_random_scripts_reach_every_finish_reason_preemptions_and_handoffs() -> None:
    worlds = [play(seed) for seed in range(60)]
    reasons = {result.reason for machine in worlds for result in machine.log.by_id.values()}
    assert reasons >= set(FinishReason) - {FinishReason.FAILED}
    assert sum(engine.scheduler.preemptions for machine in worlds for engine in machine.engines) >= 10
    assert sum(machine.joined for machine in worlds) >= 10


@pytest.mark.slow
def test_forks_leak_nothing_and_end_as_if_alone() -> None:
    worlds = [play(seed, forks=True) for seed in range(60)]
    assert sum(len(machine.forked) for machine in worlds) >= 40
    assert sum(machine.joined for machine in worlds) >= 5, "forks are handed over, too"


# -- the limits -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=8),
    budget=st.integers(8, 40),
    late=st.integers(0, 8),
)
def test_a_step_spends_its_budget_or_closes_every_gap(lengths: Sequence[int], budget: int, late: int) -> None:
    engine = make_engine(budget=budget)
    requests = [make_request(f"r{index}", prompt(length, index), 4) for index, length in enumerate(lengths)]
    for request in requests[late:]:
        engine.add(request)
    while engine.has_work or requests[:late]:
        for request in requests[:late]:
            engine.add(request)
        late = 0
        gaps = sum(sequence.num_remaining for sequence in (*engine.scheduler.running, *engine.scheduler.waiting))
        assert engine.step().num_tokens == min(budget, gaps)
    properties.nothing_is_held(engine)


def test_decodes_go_first_then_the_prompt_is_cut_to_what_is_left() -> None:
    engine = make_engine(budget=8)
    run(engine, make_request("a", 3, max_tokens=20), make_request("b", 3, max_tokens=20), steps=2)
    engine.add(make_request("long", 30))
    plan, _ = engine.scheduler.schedule()
    assert [(row.request.id, row.end - row.start) for row in plan.rows] == [("a", 1), ("b", 1), ("long", 6)]


def test_short_prompts_are_packed_until_the_budget_is_filled() -> None:
    engine = make_engine(budget=16)
    for index in range(8):
        engine.add(make_request(f"r{index}", 5))
    plan, _ = engine.scheduler.schedule()
    assert [row.end - row.start for row in plan.rows] == [5, 5, 5, 1]


def test_queued_tokens_are_those_neither_computed_nor_cached() -> None:
    engine = make_engine(budget=4, max_running=1)
    run(engine, make_request("before", 12, 1))  # leaves three blocks of 4 behind
    for id, tokens in (("a", 10), ("b", prompt(20, 5)), ("c", 15)):
        engine.add(make_request(id, tokens))
    assert engine.load().queued_tokens == (10 - 8) + 20 + (15 - 12)
    run(engine, steps=1)
    assert engine.load().queued_tokens == 1 + 20 + (15 - 12)  # a runs and has one token to feed back


def test_an_arrival_has_a_reserved_running_slot() -> None:
    engine = make_engine(max_running=1)
    engine.transfers.reserve(make_request("arriving"))
    run(engine, make_request("a"), steps=3)
    assert (engine.load().running, engine.load().waiting) == (0, 1)
    assert engine.cancel("arriving")
    assert run(engine)["a"].reason is FinishReason.LENGTH


def test_a_resumed_sequence_respects_max_running() -> None:
    engine = make_engine(max_running=1)
    run(engine, make_request("a"), steps=3)
    engine.park("a")
    run(engine, make_request("b"), steps=3)
    engine.resume("a")
    properties.running_keeps_the_limit(engine)
    log = run(engine)
    assert (log["a"].reason, log["b"].reason) == (FinishReason.LENGTH, FinishReason.LENGTH)


# -- order ------------------------------------------------------------------------------------------------------


def admissions(engine: Engine, priorities: Mapping[str, int]) -> list[str]:
    for id, priority in priorities.items():
        engine.add(make_request(id, 4, max_tokens=1, priority=priority))
    log, order = OutputLog(), list[str]()
    while engine.has_work:
        order += [ended.id for ended in log.record(engine.step()).ended]
    return order


def test_higher_priority_goes_first_then_first_come_first_served() -> None:
    order = admissions(make_engine(budget=4, max_running=1), {"a": 0, "b": 1, "c": 0, "d": -1, "e": 1})
    assert order == ["b", "e", "a", "c", "d"]


def test_no_sequence_overtakes_one_that_waits_for_blocks() -> None:
    engine = make_engine(8, max_running=4)
    run(engine, make_request("holder", prompt(16), max_tokens=8), steps=1)
    engine.add(make_request("long", prompt(20, 2), max_tokens=1))
    engine.add(make_request("short", prompt(2, 3), max_tokens=1))
    log = run(engine, steps=1)
    assert "short" not in log.by_id
    log = run(engine, log=log)
    assert log["long"].ended is not None
    assert log["short"].ended is not None


def test_a_low_priority_is_not_starved_by_a_stream_of_higher_ones() -> None:
    engine, levels = make_engine(budget=4, max_running=1), 2
    engine.add(make_request("low", 4, max_tokens=1, priority=-levels))
    for step in range(levels * STEPS_PER_PRIORITY + 20):
        engine.add(make_request(f"high{step}", prompt(4, step), max_tokens=1))
        if any(ended.id == "low" for ended in engine.step().ended):
            assert step >= levels * STEPS_PER_PRIORITY, "it went before more urgent ones"
            return
    raise AssertionError("it starved")


def test_the_least_urgent_is_preempted_and_loses_nothing() -> None:
    engine = make_engine(8)
    first = run(engine, make_request("a", prompt(10), 20), make_request("b", prompt(10, 2), 20))
    ends = [result.ended for result in first.by_id.values() if result.ended]
    assert sum(ended.timeline.preemptions for ended in ends) == engine.load().preemptions > 0
    undisturbed = run(make_engine(), make_request("a", prompt(10), 20), make_request("b", prompt(10, 2), 20))
    assert {id: result.text for id, result in first.by_id.items()} == {
        id: h.text for id, h in undisturbed.by_id.items()
    }
    properties.nothing_is_held(engine)


def test_a_preempted_sequence_keeps_its_position_in_the_queue() -> None:
    engine = make_engine(8)
    engine.add(make_request("a", prompt(10), 20))
    engine.add(make_request("b", prompt(10, 2), 20))
    step_until(engine, lambda: engine.load().waiting == 1)
    engine.add(make_request("c", prompt(10, 3), 1))
    engine.add(make_request("d", prompt(10, 4), 1, priority=1))
    assert [sequence.id for sequence in engine.scheduler.waiting] == ["d", "b", "c"]
    run(engine)
    properties.nothing_is_held(engine)


def test_a_step_tells_how_many_blocks_an_allocation_could_get() -> None:
    engine = make_engine(8)
    engine.add(make_request("a", prompt(9), 8))
    events = [engine.step().available_blocks for _ in range(8)]
    assert events == [5, 5, 5, 5, 4, 4, 4, 8]


# -- the pool alone ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), blocks=st.integers(1, 12))
def test_a_pool_adds_up_after_any_allocation_share_and_release(seed: int, blocks: int) -> None:
    rng, pool = random.Random(seed), BlockPool(blocks, 4)
    live: dict[str, BlockTable] = {}
    for turn in range(60):
        action = rng.choice(["allocate", "grow", "share", "publish", "release", "match"])
        table = rng.choice(list(live.values())) if live else None
        hashes = [bytes([n]) * 16 for n in range(rng.randint(0, 4))]
        try:
            if action == "allocate":
                live[f"o{turn}"] = pool.allocate(
                    f"o{turn}", rng.randint(0, 4), pool.index.longest_prefix(hashes).groups
                )
            elif action == "grow" and table:
                table.grow(table.num_blocks + rng.randint(1, 3))
            elif action == "share" and table and table.blocks[0]:
                live[f"o{turn}"] = pool.allocate(f"o{turn}", 0)
                live[f"o{turn}"].share(0, rng.choice(table.blocks[0]))
            elif action == "publish" and table and table.blocks[0]:
                some = rng.choices(table.blocks[0], k=rng.randint(1, 3))
                pool.publish(0, some, [bytes([rng.randrange(5)]) * 16 for _ in some])
            elif action == "release" and table:
                live.pop(table.owner).release()
        except OutOfBlocks as full:
            if full.needed <= full.available:
                raise
        pool.check_integrity(live)
    for table in live.values():
        table.release()
        table.release()  # safe
    pool.check_integrity(())
    assert pool.available_blocks == blocks
    evict_all(pool)
    assert pool.free_blocks == blocks


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    pool = BlockPool(4, 4)
    hashes = [bytes([n]) * 16 for n in range(4)]
    for owner, mine in (("old", hashes[:2]), ("new", hashes[2:])):
        table = pool.allocate(owner, 2)
        pool.publish(0, table.blocks[0], mine)
        table.release()
    pool.allocate("other", 1)
    assert pool.index.longest_prefix(hashes[:2]).num_blocks == 1
    assert pool.index.longest_prefix(hashes[2:]).num_blocks == 2


def test_a_cached_prefix_is_used_again_and_only_by_the_same_salt() -> None:
    engine = make_engine()
    run(engine, make_request("a", 12))
    for id, salt, computed in (("same", b"", 4), ("other", b"tenant", 12)):
        engine.add(make_request(id, 12, salt=salt))
        assert engine.step().num_tokens == computed
        engine.cancel(id)
        engine.step()


def test_sequences_with_a_common_prefix_share_its_blocks() -> None:
    engine = make_engine()
    for id in ("a", "b"):
        engine.add(make_request(id, 10, 20))
        engine.step()
    one, other = (
        list(sequence.block_table.held_blocks) for sequence in engine.scheduler.running if sequence.block_table
    )
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])
    assert engine.load().held_blocks == len({*one, *other})


def test_without_the_prefix_cache_nothing_is_stored_or_reused() -> None:
    engine = make_engine()
    run(engine, make_request("a", 12, use_prefix_cache=False))
    assert engine.load().cached_blocks == 0
    run(engine, make_request("b", 12))
    assert engine.load().cached_blocks
    engine.add(make_request("c", 12, use_prefix_cache=False))
    assert engine.step().num_tokens == 12


def test_a_prefix_that_was_used_again_is_evicted_after_one_that_was_not() -> None:
    pool = BlockPool(3, 4)
    hashes = [bytes([n]) * 16 for n in range(2)]
    for block_hash in hashes:
        table = pool.allocate("first", 1)
        pool.publish(0, table.blocks[0], [block_hash])
        table.release()
    pool.allocate("again", 1, pool.index.longest_prefix(hashes[:1]).groups).release()
    pool.allocate("other", 2)
    assert pool.index.find(hashes[0])
    assert not pool.index.find(hashes[1])
