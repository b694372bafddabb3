from __future__ import annotations

import json
import re
from collections.abc import Sequence
from io import StringIO
from statistics import fmean
from typing import Any, cast
from xml.etree import ElementTree

import pytest
from rich.console import Console

from bench.scheduler_overhead import NullDevice
from decant.bench.batching import curve, experiment, queues, report, slots
from decant.bench.batching.contenders import (
    CONTENDERS,
    PAGED,
    RESERVING,
    SEPARATE,
    STATIC_ALL,
    STATIC_BATCH,
    Setup,
    run,
    sample,
)
from decant.bench.batching.engine_run import make_engine, request
from decant.bench.batching.experiment import BatchingOptions, parse_caps
from decant.bench.batching.html_report import assign_slots, to_html
from decant.bench.batching.queues import Queue
from decant.bench.errors import InvalidBenchmark
from decant.bench.machine_load import busy
from decant.bench.reports.report import dump
from decant.engine.plan import Device

PUBLISHED = {32: (16, 2.0, 1.9), 128: (12, 3.0, 2.6), 512: (8, 7.0, 4.2), 1536: (4, 23.4, 6.6)}
"""By cap: batch size, and times the sequences per step of batches padded to the longest of all, and to their own."""

SVG = "{http://www.w3.org/2000/svg}"


def device() -> Device:
    return cast(Device, NullDevice(4096, 16))


def setup(token_budget: int = 256) -> Setup:
    return Setup(device(), token_budget, 0, lambda _: None)


def small(outputs: Sequence[int], batch_size: int = 4) -> Queue:
    return Queue("q", 32, outputs, max(outputs), batch_size * (32 + max(outputs)))


@pytest.mark.parametrize("cap", list(PUBLISHED))
def test_slot_arithmetic_gives_the_published_ratios(cap: int) -> None:
    made = [queues.exponential(512, 8704, cap, 1000, seed) for seed in range(2)]
    batch, over_all, over_batch = PUBLISHED[cap]
    found = [slots.ratios(queue) for queue in made]
    assert made[0].batch_size == batch
    # The longest of 1,000 answers differs by a third between seeds where the cap does not cut it.
    assert fmean(one[0] for one in found) == pytest.approx(over_all, rel=0.06)
    assert fmean(one[1] for one in found) == pytest.approx(over_batch, rel=0.04)


def test_slot_arithmetic_of_two_batches_is_that_computed_by_hand() -> None:
    queue = Queue("q", 16, [1, 4, 2, 2, 1, 8, 1, 1], 8, 4 * 24)
    assert queue.batches == [[1, 4, 2, 2], [1, 8, 1, 1]]
    assert slots.static(queue, pad_to_all=True) == 20 / 16
    assert slots.static(queue, pad_to_all=False) == 20 / 12
    # 12 blocks of 8 tokens; 2 hold a prompt, 3 also the first tokens. Six begin; four go on and fill the memory; the
    # last two join in step 3, when two have ended; the longest, which began in step 1, ends in step 8.
    assert slots.paged(queue, block=8) == 20 / 8


def test_equal_output_lengths_gain_nothing_in_slots() -> None:
    assert slots.ratios(queues.uniform(64, 64)) == pytest.approx((1.0, 1.0), rel=0.02)


def test_every_eighth_answer_is_long() -> None:
    queue = queues.every_eighth_long(64, 16, 256)
    assert [index for index, output in enumerate(queue.outputs, start=1) if output == 256] == [8, 16, 24, 32]
    assert queue.batch_size == queue.reserved == 8
    assert slots.ratios(queue) == (4.0, 4.0)


@pytest.mark.parametrize("contender", CONTENDERS)
def test_each_contender_gives_every_answer_its_own_tokens(contender: str) -> None:
    queue = small([3, 9, 1, 5, 2, 9, 4, 4, 1])
    found = run(contender, queue, setup())
    assert [len(one.tokens) for one in found.answers] == queue.outputs
    for answer in found.answers:
        assert 0 <= answer.begun_at < answer.tokens[0]
        assert answer.tokens == sorted(answer.tokens)
        assert answer.tokens[-1] <= answer.freed_at <= found.seconds


def test_static_batches_compute_their_padding() -> None:
    queue = small([3, 9, 1, 5, 2, 4, 4, 4])
    padded = {STATIC_ALL: 9 + 9, STATIC_BATCH: 9 + 4}
    for contender, steps in padded.items():
        counted = 0

        def count(tokens: int) -> None:
            nonlocal counted
            counted += tokens

        found = run(contender, queue, Setup(device(), 256, 0, count))
        assert counted == 4 * steps == experiment.total_tokens(contender, queue)
        assert found.decode_steps == steps - 2  # the first token comes from the prompt
        assert found.summary(queue)["useful_per_step"] == (32 - 8) / (steps - 2)
    # All slots of a batch are free when its longest answer ends.
    assert len({one.freed_at for one in found.answers[:4]}) == 1


def test_a_sample_of_five_batches_is_measured_and_the_others_are_scaled_by_their_steps() -> None:
    assert sample(4) == [0, 1, 2, 3]
    assert sample(12) == [0, 2, 4, 7, 9]
    queue = small(([2] * 4 + [80] + [2] * 3) * 3)
    found = run(STATIC_BATCH, queue, setup())
    assert (found.measured, found.batches) == (5, 6)
    left_out = next(index for index in range(6) if index not in sample(6))
    batches = [found.answers[at : at + 4] for at in range(0, 24, 4)]
    took = [max(one.freed_at for one in batch) - min(one.begun_at for one in batch) for batch in batches]
    assert found.seconds >= sum(took)
    scaled, padded = batches[left_out], max(queue.batches[left_out])
    gaps = [gap for one in scaled for gap in one.gaps]
    assert max(gaps) == pytest.approx(min(gaps)), "steps of a scaled batch are all of the mean length"
    assert took[left_out] == pytest.approx(scaled[0].tokens[0] - scaled[0].begun_at + (padded - 1) * gaps[0])


def test_paged_runs_more_sequences_than_reserving_within_the_same_memory() -> None:
    queue = small([4, 4, 4, 160] * 12)
    figures = {name: run(name, queue, setup()).summary(queue) for name in (RESERVING, PAGED)}
    assert figures[PAGED]["useful_per_step"] > 1.25 * figures[RESERVING]["useful_per_step"]
    assert figures[RESERVING]["useful_per_step"] <= queue.reserved
    for one in figures.values():
        assert 0 < one["kv_used"] <= 1
        assert 0 <= one["kv_lost_in_blocks"] < 0.5


def test_memory_holds_at_most_the_kv_tokens_of_the_queue() -> None:
    queue = small([4, 4, 4, 64] * 8)
    for contender in (RESERVING, PAGED, SEPARATE):
        found = run(contender, queue, setup())
        assert max(found.allocated_tokens) <= queue.kv_tokens
        assert all(used <= held for used, held in zip(found.used_tokens, found.allocated_tokens, strict=True))


@pytest.mark.parametrize("separate", [True, False])
def test_separate_steps_compute_prompts_or_decodes_and_others_mix_them(separate: bool) -> None:
    plans: list[tuple[bool, bool]] = []

    class Watched(NullDevice):
        def run(self, plan: Any) -> Any:
            decodes = [row for row in plan.rows if row.end - row.start == 1]
            plans.append((bool(decodes), len(decodes) < len(plan.rows)))
            return super().run(plan)

    engine = make_engine(cast(Device, Watched(64, 16)), 1024, 64, 3, separate_prefill=separate)
    for index in range(6):
        engine.add(request(str(index), [1] * 40, 3 + index))
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    assert ((True, True) in plans) is not separate
    assert {(True, False), (False, True)} <= set(plans)


def test_spans_of_one_slot_do_not_overlap() -> None:
    spans = [
        [0.0, 1.0, 2.0, 2.0],
        [0.0, 1.0, 5.0, 5.0],
        [2.0, 3.0, 4.0, 4.0],
        [3.0, 3.5, 6.0, 6.0],
        [4.0, 5.0, 6.0, 6.0],
    ]
    assert assign_slots(spans) == [0, 1, 0, 2, 0]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    parts: dict[str, list[int]] = {}

    def notify(name: str, tokens: int, total: int) -> None:
        done = parts.setdefault(name, [0, total])
        done[0] += tokens

    options = BatchingOptions(caps=(8, 64), requests=32, prompt_tokens=32, kv_tokens=512)
    measured = experiment.measure("models/small", device(), options, notify)
    assert all(done == total for done, total in parts.values()), "every bar of the progress is full at its end"
    return measured


@pytest.mark.slow
def test_the_document_has_every_queue_contender_and_ratio(document: dict[str, Any]) -> None:
    assert json.loads(dump(document)) == document
    assert [one["batch_size"] for one in document["batch_sizes"]] == list(curve.SIZES)
    assert len(document["queues"]) == 4
    for queue in document["queues"]:
        assert list(queue["runs"]) == list(CONTENDERS)
        paged, static = queue["runs"][PAGED], queue["runs"][STATIC_BATCH]
        ratio = paged["output_throughput"] / static["output_throughput"]
        assert queue["over_batch"]["throughput"] == pytest.approx(ratio)
    assert f"{document['queues'][0]['over_batch']['throughput']:.1f} times" in document["sentence"]


def test_tables_say_how_static_batches_were_measured(document: dict[str, Any]) -> None:
    out = StringIO()
    report.show({**document, "load_average": 9.0, "cores": 2}, Console(file=out, width=200))
    text = out.getvalue()
    assert "5 of 8 are measured, the others are scaled from these by their steps" in text
    assert "Load average 9.0 on 2 cores" in text
    assert document["sentence"] in text
    assert not busy({"load_average": 1.0, "cores": 2})


def test_the_html_report_has_a_timeline_of_slots_with_padding(document: dict[str, Any]) -> None:
    page = to_html(document)
    assert not re.search(r"(src|href)=|@import|url\(", page)
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    by_title = {next(chart.iter(f"{SVG}text")).text: chart for chart in charts}
    names = (STATIC_ALL, PAGED)
    bars = {name: len(list(by_title[f"Slots: {name}"].iter(f"{SVG}rect"))) for name in names}
    # Prompt and answer of 32 requests, padding of the 28 short ones, and three entries of the legend.
    assert bars == {STATIC_ALL: 32 * 2 + 28 + 3, PAGED: 32 * 2 + 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tokens": 100}, "--kv-tokens: at least 544"),
        ({"caps": (1 << 20,)}, "outputs: at most"),
        ({"kv_tokens": 1 << 20}, "--kv-memory: memory for at least"),
    ],
)
def test_a_queue_that_does_not_fit_is_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidBenchmark, match=message):
        experiment.measure("m", device(), BatchingOptions(**options), lambda *_: pytest.fail("it ran"))


def test_caps_are_numbers_in_order() -> None:
    assert parse_caps("512, 32,32") == (32, 512)
    for text in ("", "1", "x", "-4", "4,,8"):
        with pytest.raises(InvalidBenchmark, match="--caps: whole numbers from 2"):
            parse_caps(text)
