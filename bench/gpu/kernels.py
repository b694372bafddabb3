"""Time single kernels of the engine on one GPU beside its limits, with variants of their options.

    python -m bench.gpu.kernels --seconds 90 --json OUT.json
    TRITON_INTERPRET=1 python -m bench.gpu.kernels --device cpu --tiny       to test this command

Prints microseconds, the bytes or operations per second, and their share of a copy's bandwidth or a product's rate.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from bench.gpu import ceilings
from bench.gpu.coded_works import coded
from bench.gpu.expert_works import experts
from bench.gpu.kernel_works import TINY, Kernels, Make, Shape
from bench.gpu.rows import FAILURES, free_memory
from bench.gpu.timing import microseconds
from bench.options import add_json, write_result
from decant.engine.library_errors import triton_errors

SECTIONS = ("decode", "chunk", "skinny", "products", "elementwise", "draw", "coded", "experts")


@dataclass(frozen=True)
class Timed:
    name: str
    us: float | None
    gb_s: float | None = None
    tflop_s: float | None = None
    share: float | None = None
    why: str = ""


class Report:
    """Times sections until ``seconds`` are over; ``write`` gets all rows after each."""

    def __init__(self, kernels: Kernels, seconds: float, write: Callable[[list[Timed]], object]) -> None:
        self._kernels = kernels
        self._ends = time.monotonic() + seconds
        self._write = write
        self.rows: list[Timed] = []
        shape, device = kernels.shape, kernels.device
        self._bandwidth = ceilings.bandwidth(device, shape.copied_bytes)
        self._rate = ceilings.product_rate(device, shape.product)
        self._add(Timed("copy", None, self._bandwidth / 1e9, share=1.0))
        self._add(Timed("product", None, tflop_s=self._rate / 1e12, share=1.0))

    def run(self, sections: Sequence[str]) -> None:
        works = self._kernels.sections() | {each.__name__: partial(each, self._kernels) for each in (coded, experts)}
        for section in sections:
            for make in works[section]():
                if time.monotonic() > self._ends:
                    self._add(Timed(f"{section}, the rest", None, why="time is over"))
                    break
                self._measure(make, section)
            free_memory(self._kernels.device)

    def _measure(self, make: Make, section: str) -> None:
        name = section
        try:
            work = make()
            name, us = work.name, microseconds(work.calls, self._kernels.device)
        except FAILURES + triton_errors() as error:
            self._add(Timed(name, None, why=f"{type(error).__name__}: {str(error)[:200]}"))
            return
        by_bytes, by_operations = work.bytes / us * 1e6, work.operations / us * 1e6
        share = max(by_bytes / self._bandwidth, by_operations / self._rate)
        self._add(Timed(work.name, us, by_bytes / 1e9 or None, by_operations / 1e12 or None, share))

    def _add(self, row: Timed) -> None:
        self.rows.append(row)
        print(line(row), file=sys.stderr, flush=True)
        self._write(self.rows)


def line(row: Timed) -> str:
    if row.why:
        return f"{row.name:<70} not measured: {row.why}"
    parts = [
        f"{number:>{width}.{digits}f} {unit}" if number is not None else " " * (width + len(unit) + 1)
        for number, width, digits, unit in (
            (row.us, 9, 1, "us"),
            (row.gb_s, 7, 0, "GB/s"),
            (row.tflop_s, 7, 1, "TFLOP/s"),
        )
    ]
    return f"{row.name:<70} {' '.join(parts)} {100 * (row.share or 0):>5.1f} %"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.kernels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to test this command")
    parser.add_argument("--seconds", type=float, default=90.0, help="no kernel is timed later")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    add_json(parser)
    args = parser.parse_args(arguments)
    sections = args.sections.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"--sections: of {', '.join(SECTIONS)}, got {', '.join(sorted(unknown))}")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cpu on a machine without a GPU (with --tiny and TRITON_INTERPRET=1)")

    def write(rows: list[Timed]) -> None:
        if args.json != "-":
            write_result({"rows": [asdict(row) for row in rows]}, args.json, lambda: None)

    with torch.inference_mode():
        report = Report(Kernels(TINY if args.tiny else Shape(), device), args.seconds, write)
        report.run(sections)
    if args.json == "-":
        write_result({"rows": [asdict(row) for row in report.rows]}, args.json, lambda: None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
