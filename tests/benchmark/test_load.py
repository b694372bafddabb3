from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from typing import Any, Never

import pytest
from google.rpc import code_pb2

from decant.bench.benchmark import BenchOptions, RequestSource, _Benchmark, check, parse_slos
from decant.bench.errors import InvalidBenchmark
from decant.bench.records import Record
from decant.bench.traffic.arrivals import ramp_arrivals, random_arrivals
from decant.bench.traffic.lengths import Exponential, Uniform, parse_lengths
from decant.bench.traffic.load import LOST_IN_A_ROW, Load
from decant.bench.traffic.sweep import HALVINGS, MAX_DOUBLINGS, sweep
from decant.bench.traffic.workload import (
    ANYSCALE,
    BenchRequest,
    SharedPrefix,
    prompts,
    random_requests,
    read_sharegpt,
    read_trace,
)
from decant.protos import inference_pb2 as pb
from decant.runtime.error_details import ErrorDetail
from decant.runtime.errors import ServiceError


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_of_their_process(burstiness: float) -> None:
    arrivals = random_arrivals(40_000, 5.0, burstiness, seed=3)
    gaps = [after - before for before, after in pairwise([0.0, *arrivals])]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.03)
    assert arrivals == sorted(arrivals)


def test_a_burstiness_of_one_is_a_poisson_process() -> None:
    counts = [0] * 5000
    for arrival in random_arrivals(60_000, 10.0, 1.0, seed=5):
        if arrival < 5000:
            counts[int(arrival)] += 1
    assert fmean(counts) == pytest.approx(10.0, rel=0.02)
    assert pstdev(counts) ** 2 == pytest.approx(10.0, rel=0.06)


@pytest.mark.parametrize("rates", [(2.0, 18.0), (18.0, 2.0), (10.0, 10.0)])
def test_a_ramp_has_the_area_under_its_rate_as_arrivals(rates: tuple[float, float]) -> None:
    """The count in each tenth is Poisson: mean and variance equal the integral of the rate."""
    count, parts, runs = 400, 10, 150
    begin, end = rates
    seconds = 2 * count / (begin + end)
    counts = [[0] * parts for _ in range(runs)]
    for seed in range(runs):
        for at in ramp_arrivals(count, rates, 1.0, seed):
            if at < seconds:
                counts[seed][int(at / seconds * parts)] += 1
    for part in range(parts - 2):
        middle = begin + (end - begin) * (part + 0.5) / parts
        expected = middle * seconds / parts
        found = [one[part] for one in counts]
        assert fmean(found) == pytest.approx(expected, rel=0.1)
        assert pstdev(found) ** 2 == pytest.approx(expected, rel=0.4)


def test_a_ramp_ends_at_its_second_rate_and_keeps_it() -> None:
    arrivals = ramp_arrivals(2000, (5.0, 20.0), 1e6, seed=1)
    assert arrivals[1] - arrivals[0] == pytest.approx(1 / 5, rel=0.02)
    assert arrivals[-1] - arrivals[-2] == pytest.approx(1 / 20, rel=0.02)
    assert arrivals[-1] == pytest.approx(2000 / 12.5, rel=0.01)


def test_lengths_have_their_form() -> None:
    rng = Random(1)
    uniform = [parse_lengths("", "100-200").draw(rng) for _ in range(20_000)]
    assert (min(uniform), max(uniform)) == (100, 200)
    assert fmean(uniform) == pytest.approx(150, rel=0.01)
    exponential = [parse_lengths("", "exp:128:100000").draw(rng) for _ in range(20_000)]
    assert fmean(exponential) == pytest.approx(128.5, rel=0.03)  # rounded up
    assert max(parse_lengths("", "exp:128:32").draw(rng) for _ in range(1000)) == 32
    assert parse_lengths("", "7") == Uniform(7, 7)


def test_exponential_lengths_cut_far_below_their_mean_are_drawn_at_once() -> None:
    rng, lengths = Random(1), parse_lengths("", "exp:900000000:4")
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert all(drawn.count(length) == pytest.approx(1000, rel=0.15) for length in (1, 2, 3, 4))


def test_the_anyscale_workload_has_its_published_lengths() -> None:
    assert (Uniform(512, 512), Exponential(128, 1536)) == ANYSCALE


@pytest.mark.parametrize("text", ["0", "5-2", "exp:0:4", "exp:4", "x", "", "9" * 5000, f"exp:{'9' * 400}:5"])
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidBenchmark, match="--prompt-tokens: a number, a range"):
        parse_lengths("--prompt-tokens", text)


def test_lengths_beyond_the_context_are_refused_before_a_prompt_is_drawn() -> None:
    options = BenchOptions(rate=1.0, prompt_tokens="100-900000000", requests=10**9)
    source = RequestSource(pb.Model(id="m", vocab_size=9, max_context_length=2048), options, [BenchRequest([1], 1)])
    source.take(1.0)
    with pytest.raises(InvalidBenchmark, match=r"at most 2,048 with the output .*, got 900,000,064"):
        source.take(2.0)


async def test_more_clients_than_requests_are_no_more_tasks() -> None:
    load = Load(None, "", 1.0, lambda _: None)  # type: ignore[arg-type]
    assert await load.closed([], 10**9) == []


def test_prompts_share_prefixes_and_differ_behind_them() -> None:
    requests = random_requests(40, 1000, (Uniform(8, 8), Uniform(2, 4)), SharedPrefix(tokens=32, count=3), seed=1)
    assert len({tuple(one.prompt[:32]) for one in requests}) == 3
    assert len({tuple(one.prompt[32:]) for one in requests}) == 40
    assert {len(one.prompt) for one in requests} == {40}
    assert {one.output_len for one in requests} == {2, 3, 4}


async def test_no_prompt_of_a_warm_up_or_of_a_run_is_sent_by_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    options = BenchOptions(requests=8, rate=1.0, prompt_tokens="16", output_tokens="1", warm_up=4, seed=0)
    model, sent = pb.Model(vocab_size=1000), list[tuple[int | str, ...]]()

    class WarmUps:
        async def closed(self, requests: Sequence[BenchRequest], _: int) -> list[Record]:
            sent.extend(tuple(request.prompt) for request in requests)
            return [Record(0.0, 0.0)]

    requests = random_requests(8, 1000, (Uniform(16, 16), Uniform(1, 1)), SharedPrefix(), options.seed)
    bench = _Benchmark(None, model, options, requests, lambda *_: None)  # type: ignore[arg-type]
    monkeypatch.setattr(bench, "_load", lambda *_: WarmUps())
    await bench.warm_up()
    for rate in (1.0, 2.0, 1.5):
        sent += [tuple(request.prompt) for request in bench._source.take(rate)]
    assert len(set(sent)) == len(sent) == 4 + 8 + 16 + 12


def test_without_a_seed_each_benchmark_has_its_own() -> None:
    assert len({BenchOptions().seed for _ in range(10)}) > 1


def test_a_seed_gives_the_same_requests_again() -> None:
    made = [random_requests(5, 100, ANYSCALE, SharedPrefix(), seed) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"id": f"{at}", "prompt_token_ids": [1, 2], "output_len": 3, "arrival_s": at} for at in (2.5, 0.0, 1.0)]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [one.arrival_s for one in read_trace(file, 10, 100)] == [0.0, 1.0, 2.5]
    with pytest.raises(InvalidBenchmark, match=r"line 1: output_len: at most 4 tokens with the prompt, got 5"):
        read_trace(file, 10, 4)


class Gone:
    usage = receipt = None

    def __init__(self) -> None:
        self.sent = 0

    def stream(self, *_: object, **__: object) -> Gone:
        self.sent += 1
        return self

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...

    def __aiter__(self) -> Gone:
        return self

    async def __anext__(self) -> Never:
        raise ServiceError(ErrorDetail(code_pb2.UNAVAILABLE, "no connection"))


async def test_clients_stop_once_no_router_answers() -> None:
    gone = Gone()
    records = await Load(gone, "", 1.0, lambda _: None).closed([BenchRequest([1], 2)] * 100, 2)  # type: ignore[arg-type]
    assert gone.sent == len(records) == 2 * LOST_IN_A_ROW
    assert {one.error for one in records} == {"UNAVAILABLE"}


REQUEST = '{"id": "a", "prompt_token_ids": [1], "output_len": 3, "arrival_s": 0}'


def test_a_trace_begins_with_its_first_request(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    later = REQUEST.replace('"a"', '"b"').replace(": 0}", ": 1763000002.5}")
    file.write_text("\n".join((later, REQUEST.replace(": 0}", ": 1763000000}"))))
    assert [one.arrival_s for one in read_trace(file, 10, 100)] == [0.0, 2.5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (REQUEST.replace(": 3", ": " + "9" * 5000), "line 3: line: a JSON object"),
        ("[" * 200_000, "line 3: line: a JSON object"),
        (REQUEST.replace(": 0}", ": 1" + "0" * 400 + "}"), "line 3: arrival_s: a number of seconds from 0"),
        (REQUEST.replace("[1]", "[10]"), "line 3: prompt_token_ids: token ids below 10, got 10"),
    ],
)
def test_a_line_of_a_trace_that_can_not_be_sent_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n" + REQUEST.replace('"a"', '"b"') + "\n" + line, encoding="utf-8")
    with pytest.raises(InvalidBenchmark) as refused:
        read_trace(file, 10, 100)
    assert message in str(refused.value)


def test_a_dataset_in_another_encoding_is_refused_and_a_line_separator_in_a_string_is_none(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(REQUEST.replace("a", "\N{LINE SEPARATOR}", 1), encoding="utf-8")
    assert len(read_trace(file, 10, 100)) == 1
    file.write_bytes(b"\xff")
    for read in (read_sharegpt, lambda path: read_trace(path, 10, 100)):
        with pytest.raises(InvalidBenchmark, match=r"--dataset: .*'utf-8' codec can't decode"):
            read(file)


def test_sharegpt_gives_questions_and_answers_while_they_alternate(tmp_path: Path) -> None:
    def turns(*pairs: tuple[str, str]) -> dict[str, Any]:
        return {"conversations": [{"from": role, "value": value} for role, value in pairs]}

    file = tmp_path / "sharegpt.json"
    kept = turns(("human", "q"), ("gpt", "a"), ("human", "r"))
    file.write_text(json.dumps([kept, turns(("gpt", "a"), ("human", "q")), turns(("human", "q")), {}, 3]))
    assert read_sharegpt(file) == [[("q", "a")]]
    longer = turns(("user", "q"), ("assistant", "a"), ("human", "r"), ("gpt", "b"), ("gpt", "c"), ("human", "s"))
    empty = turns(("human", "q"), ("gpt", "a"), ("human", ""), ("gpt", "b"))
    file.write_text(json.dumps([longer, empty]))
    assert read_sharegpt(file) == [[("q", "a"), ("r", "b")], [("q", "a")]]
    lone = "\ud800"  # a surrogate that UTF-8 does not encode
    cut, skipped = (
        turns(("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", lone)),
        turns(("human", lone), ("gpt", "a")),
    )
    file.write_text(json.dumps([cut, skipped]))
    assert read_sharegpt(file) == [[("q", "a")]]
    file.write_text("[]")
    with pytest.raises(InvalidBenchmark, match="begin with a question and an answer, got none"):
        read_sharegpt(file)


def test_the_prompt_of_a_turn_is_the_conversation_before_it() -> None:
    assert prompts([("q", "a"), ("r", "b"), ("s", "c")]) == ["q", "q\na\nr", "q\na\nr\nb\ns"]


def test_objectives_are_parsed_in_seconds() -> None:
    assert parse_slos("ttft=500ms, tpot=0.05s,e2el=2") == {"ttft": 0.5, "tpot": 0.05, "e2el": 2.0}
    for text in ("ttft", "ttft=0ms", "itl=1s", "ttft=x", "ttft=inf"):
        with pytest.raises(InvalidBenchmark, match="--slo"):
            parse_slos(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workload": "x"}, "--workload: random or anyscale, got x"),
        ({"rate": 1.0, "concurrency": 2}, "--rate, --concurrency: one of them"),
        ({"sweep": True, "rate": 1.0}, "--sweep: with --rate"),
        ({"sweep": True, "slos": {"ttft": 1.0}}, "--sweep: with --rate"),
        ({"trace": True}, "--trace: with --dataset"),
        ({"trace": True, "dataset": Path("x.jsonl"), "rate": 1.0}, "--trace: no --rate"),
        ({"workload": "anyscale", "dataset": Path("x.jsonl")}, "--dataset: no --workload"),
        ({"prompt_tokens": "0"}, "--prompt-tokens"),
        ({"ramp_to": 4.0}, "--ramp-to: with --rate"),
        (
            {"ramp_to": 4.0, "rate": 1.0, "sweep": True, "slos": {"ttft": 1.0}},
            "--ramp-to: with --rate, where it begins",
        ),
        ({"multi_turn": True}, "--multi-turn: with --dataset"),
        ({"multi_turn": True, "dataset": Path("x.jsonl")}, "--multi-turn: with --dataset"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidBenchmark, match=message):
        check(BenchOptions(**options))


@pytest.mark.parametrize("limit", [0.5, 1.0, 5.6, 1e9])
async def test_a_sweep_brackets_the_highest_rate_that_keeps(limit: float) -> None:
    rates: list[float] = []

    async def run(rate: float) -> dict[str, Any]:
        rates.append(rate)
        return {"request_rate": rate}

    await sweep(1.0, run, lambda one: one["request_rate"] <= limit)
    assert len(rates) == len(set(rates))
    kept = max((rate for rate in rates if rate <= limit), default=0.0)
    beyond = [rate for rate in rates if rate > limit]
    if limit < 1.0:
        assert rates == [1.0]
    elif limit > 1e6:
        assert (len(rates), beyond) == (MAX_DOUBLINGS + 1, [])
    else:
        assert min(beyond) - kept <= kept / 2**HALVINGS * 1.001


def test_runs_of_a_sweep_send_for_the_same_time_and_other_prompts() -> None:
    options = BenchOptions(requests=10, rate=2.0)
    source = RequestSource(pb.Model(vocab_size=100_000), options, [BenchRequest([1], 1)] * 10)
    first, second, third = source.take(2.0), source.take(4.0), source.take(3.0)
    assert [len(one) for one in (first, second, third)] == [10, 20, 15]
    assert not {tuple(one.prompt) for one in second} & {tuple(one.prompt) for one in third}


def test_runs_of_a_sweep_repeat_the_requests_of_a_file() -> None:
    options = BenchOptions(dataset=Path("x.jsonl"), rate=1.0)
    requests = [BenchRequest([n], 1) for n in range(3)]
    source = RequestSource(pb.Model(), options, requests)
    assert source.take(1.0) == requests
    assert source.take(2.0) == requests * 2
