"""A plan beside what a deployment of this machine measures.

    python -m bench.plan_validation --model smollm2-135m [--json OUT]

    calibration    `decant bench calibrate`, on a deployment of its own, with other prompts
    plan           `decant plan` with these costs: saturation, and TTFT p50 and TPOT p50 at 30 % and 60 % of it
    measurement    one prefill and one decode worker, ``--rounds`` times: saturation, then both rates

A run continues what OUT holds. Every prompt is handed off. The rates are shares of the first round's saturation.
Figures are medians of the rounds, whose requests and arrivals differ.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench import machine
from bench.options import positive
from decant.bench import benchmark, model_shapes
from decant.bench.benchmark import BenchOptions, Target
from decant.bench.calibration.experiment import CalibrationOptions
from decant.bench.reports.console import make_table
from decant.command.bench import calibrate as bench_calibrate
from decant.command.deployment.temporary_deployment import temporary_deployment
from decant.command.up.resources import parse_size
from decant.plan.capacity.memory import KvCapacity
from decant.plan.capacity.model_shape import read_shape
from decant.plan.costs import cost_profile
from decant.plan.costs.cost_profile import Profile
from decant.plan.costs.speed import Measured
from decant.plan.errors import InvalidPlan
from decant.plan.quantities import Slo, parse_tokens
from decant.plan.sizing import Plan, Sizing
from decant.plan.workload import Workload

GOAL = 0.2
SHARES = (0.3, 0.6)
_CALIBRATION_SEED = 1_000_000
_CLIENTS, _SATURATION_REQUESTS = 24, 144
"""Clients and requests of the saturation run: with few clients all are in one pool at a time."""


@dataclass(frozen=True)
class Options:
    model: str
    prompt_tokens: str
    output_tokens: str
    kv_memory: str
    rounds: int
    seconds: float


@dataclass(frozen=True)
class Figure:
    name: str
    predicted: float
    measured: Sequence[float]

    @property
    def error(self) -> float:
        return self.predicted / median(self.measured) - 1


def calibrate(options: Options) -> dict[str, Any]:
    prompt, output = (parse_tokens("", text) for text in (options.prompt_tokens, options.output_tokens))
    calibration = CalibrationOptions(prompt.high, round(output.mean), seed=_CALIBRATION_SEED)
    return bench_calibrate.measure(options.model, options.kv_memory, calibration, lambda *_: None)


def planned(options: Options, profile: Profile, rate: float) -> Plan:
    layout = read_shape(Path(options.model)).kv_layout("bfloat16")
    kv_capacity = KvCapacity(parse_size(options.kv_memory), 0, layout, share=1.0)
    prompt, output = (parse_tokens("", text) for text in (options.prompt_tokens, options.output_tokens))
    speed = Measured(profile.prefill, profile.decode)
    plan = Sizing(speed, kv_capacity, Workload(prompt, output, rate), Slo(), profile.overheads).plan()
    if (plan.prefill_workers, plan.decode_workers) != (1, 1):
        raise InvalidPlan("rate", "one prefill and one decode worker", f"{rate:.3g} requests/s")
    return plan


def measure(options: Options, rounds: list[dict[str, float]], on_round: Callable[[], None]) -> None:
    arguments = ("--prefill", "1", "--decode", "1", "--model", options.model, "--kv-memory", options.kv_memory)
    with (
        temporary_deployment(*arguments, variables=bench_calibrate.HAND_ALL_OFF) as deployment,
        contextlib.closing(asyncio.new_event_loop()) as loop,
    ):
        load = BenchOptions(prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens, warm_up=1)

        def run(seed: int, rate: float | None) -> dict[str, Any]:
            one = replace(load, requests=_SATURATION_REQUESTS, concurrency=_CLIENTS, seed=seed)
            if rate is not None:
                one = replace(one, requests=max(2, round(rate * options.seconds)), concurrency=None, rate=rate)
            (document,) = loop.run_until_complete(
                benchmark.run(Target(deployment.addresses), one, lambda *_: None, [])
            ).runs
            if document["failed"]:
                raise RuntimeError(f"{document['failed']} requests failed: {document['errors_by_reason']}")
            return document

        while len(rounds) < options.rounds:
            seed = 100 * len(rounds)
            figures = {"saturation": throughput(run(seed, None))}
            saturation = rounds[0]["saturation"] if rounds else figures["saturation"]
            for number, share in enumerate(SHARES, start=1):
                document = run(seed + number, share * saturation)
                figures[f"ttft at {share:.0%}"] = document["median_ttft_ms"]
                figures[f"tpot at {share:.0%}"] = document["median_tpot_ms"]
            rounds.append(figures)
            on_round()


def throughput(document: Mapping[str, Any]) -> float:
    """Requests/s without the first two rounds of the clients, which begin together, and without the last round."""
    lasts: list[float] = sorted(last for _, _, last in document["spans"])
    ends = lasts[2 * _CLIENTS : -_CLIENTS]
    return (len(ends) - 1) / (ends[-1] - ends[0])


def compare(options: Options, profile: Profile, rounds: Sequence[Mapping[str, float]]) -> list[Figure]:
    saturation = rounds[0]["saturation"]
    predicted = {"saturation": planned(options, profile, saturation / 1000).goodput}
    for share in SHARES:
        plan = planned(options, profile, share * saturation)
        predicted |= {f"ttft at {share:.0%}": plan.ttft_median * 1e3, f"tpot at {share:.0%}": plan.tpot * 1e3}
    return [Figure(name, value, [one[name] for one in rounds]) for name, value in predicted.items()]


def show(options: Options, figures: Sequence[Figure], console: Console) -> None:
    table = make_table(
        f"prompts of {options.prompt_tokens} tokens, outputs of {options.output_tokens}",
        ("", "predicted", "measured", "rounds", "error"),
    )
    for one in figures:
        rounds = " ".join(f"{value:.4g}" for value in one.measured)
        table.add_row(one.name, f"{one.predicted:.4g}", f"{median(one.measured):.4g}", rounds, f"{one.error:+.0%}")
    console.print(table)
    worst = max(figures, key=lambda one: abs(one.error))
    console.print(
        f"Saturation in requests/s, TTFT and TPOT are medians in ms. Largest error: {worst.error:+.0%} ({worst.name}); "
        f"goal {GOAL:.0%}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plan_validation", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="folder, or a shape with random weights")
    parser.add_argument("--prompt-tokens", default="200-300")
    parser.add_argument("--output-tokens", default="64")
    parser.add_argument("--kv-memory", default="512M")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seconds", type=float, default=25.0, help="of a run at a rate")
    parser.add_argument("--json", metavar="OUT", help="write the figures there, after each round")
    args = parser.parse_args()
    names = ("prompt_tokens", "output_tokens", "kv_memory", "rounds", "seconds")
    options = Options(str(model_shapes.checkpoint(args.model)), **{name: getattr(args, name) for name in names})
    facts = {"machine": machine.facts(), "options": {**asdict(options), "model": args.model}}
    document: dict[str, Any] = {**facts, "rounds": []}
    out = Path(args.json) if args.json else None
    if out is not None and out.exists():
        document = json.loads(out.read_text(encoding="utf-8"))
    if "calibration" not in document:
        document["calibration"] = calibrate(options)
    profile = cost_profile.from_document(document["calibration"])
    figures: list[Figure] = []

    def on_round() -> None:
        figures[:] = compare(options, profile, document["rounds"])
        document["figures"] = [{**asdict(one), "error": one.error} for one in figures]
        if out is not None:
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        show(options, figures, Console())

    measure(options, document["rounds"], on_round)


if __name__ == "__main__":
    main()
