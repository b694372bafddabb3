"""The cost of batch invariance: an engine step beside the same model without it.

    python -m bench.exactness [--shape qwen2.5-0.5b] [--dtype float32] [--json OUT]

The plain contender uses torch's linear layers and one ``scaled_dot_product_attention`` per sequence. Both alternate on
the same blocks. Also counts rows whose logits differ in bits between a batched decode and the same decode alone.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedModel

from bench.medians import in_turn
from bench.options import add_json, positive, write_result
from decant.bench import model_shapes as shapes
from decant.engine.checkpoint import checkpoint
from decant.engine.loading import load
from decant.engine.model.attention.interface import AttentionCall, attending
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.model.probe import learn_attention
from decant.engine.plan import Row
from decant.engine.request import Request

CASES = {"decode 1": (1, 1), "decode 8": (8, 1), "decode 64": (64, 1), "prompt 512": (1, 512)}
"""Sequences, and tokens of each."""

CONTEXT = 256


class PlainAttention:
    def __init__(self, device: ModelDevice, rows: Sequence[Row]) -> None:
        self._store = device.store
        self._rows = rows
        size = device.block_size
        places = [(row.blocks[0][p // size], p % size) for row in rows for p in range(row.start, row.end)]
        self._blocks, self._slots = torch.tensor(places).unbind(1)
        self._tables = [torch.tensor([row.blocks[0].tolist()], dtype=torch.int32) for row in rows]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self._store.put(
            call.layer, self._blocks, self._slots, (call.key[0].transpose(0, 1), call.value[0].transpose(0, 1))
        )
        outputs, at = [], 0
        for row, table in zip(self._rows, self._tables, strict=True):
            count = row.end - row.start
            keys, values = (part[:, : row.end].transpose(1, 2) for part in self._store.gather(call.layer, table))
            query = call.query[:, :, at : at + count]
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query, keys, values, is_causal=count > 1, scale=call.scaling, enable_gqa=True
                )
            )
            at += count
        return torch.cat(outputs, 2).transpose(1, 2)


def plain_logits(model: PreTrainedModel, device: ModelDevice, rows: Sequence[Row]) -> torch.Tensor:
    tokens = [token for row in rows for token in row.tokens[row.start : row.end]]
    positions = [position for row in rows for position in range(row.start, row.end)]
    last = torch.tensor([row.end - row.start for row in rows]).cumsum(0) - 1
    with torch.inference_mode(), attending(PlainAttention(device, rows)):
        ids, at = torch.tensor([tokens]), torch.tensor([positions])
        logits: torch.Tensor = model(input_ids=ids, position_ids=at, use_cache=False, logits_to_keep=last).logits[0]
    return logits


def exact_logits(device: ModelDevice, rows: Sequence[Row]) -> torch.Tensor:
    last = np.cumsum([row.end - row.start for row in rows]) - 1
    with torch.inference_mode():
        return device.runner.logits(rows, last)


def make_rows(device: ModelDevice, sequences: int, count: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    start = CONTEXT if count == 1 else 0
    needed = -(-(start + count) // device.block_size)
    rows = []
    for index in range(sequences):
        tokens = torch.randint(device.vocab_size, (start + count,), generator=generator).tolist()
        blocks = array("i", range(index * needed, (index + 1) * needed))
        rows.append(Row(Request(f"s{index}", tuple(tokens)), tokens, start, start + count, (blocks,), True))
    return rows


def measure(model: PreTrainedModel, device: ModelDevice, case: tuple[int, int], runs: int) -> dict[str, Any]:
    rows = make_rows(device, *case)
    plain_ms, exact_ms = in_turn([lambda: plain_logits(model, device, rows), lambda: exact_logits(device, rows)], runs)
    changed = {
        "plain": _changed(partial(plain_logits, model, device), rows),
        "exact": _changed(partial(exact_logits, device), rows),
    }
    return {
        "plain_ms": plain_ms,
        "exact_ms": exact_ms,
        "ratio": exact_ms / plain_ms,
        "rows": len(rows),
        "rows_changed_by_the_batch": changed,
    }


def _changed(logits: Callable[[Sequence[Row]], torch.Tensor], rows: Sequence[Row]) -> int:
    alone = torch.cat([logits([row]) for row in rows])
    return int((logits(rows) != alone).any(-1).sum())


def run(shape: str, dtype: str, runs: int) -> dict[str, Any]:
    folder = str(shapes.make(shape))
    device = load(ModelConfig(folder, dtype=dtype, device="cpu", context_length=2048, kv_bytes=1 << 30))
    source = checkpoint.open(folder)
    model = source.read(getattr(torch, dtype), torch.device("cpu"))
    learn_attention(model, source.name, 2048)
    cases = track(CASES.items(), "measuring", console=Console(stderr=True), transient=True)
    results = {name: measure(model, device, case, runs) for name, case in cases}
    return {"shape": shape, "dtype": dtype, "threads": torch.get_num_threads(), "context": CONTEXT, "cases": results}


def show(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['shape']}, {report['dtype']}, {report['threads']} threads, context {CONTEXT}")
    for heading in ("step", "plain ms", "exact ms", "exact / plain", "rows other than alone: plain", "exact"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for name, case in report["cases"].items():
        changed = case["rows_changed_by_the_batch"]
        figures = (f"{case['plain_ms']:.1f}", f"{case['exact_ms']:.1f}", f"{case['ratio']:.2f}")
        table.add_row(name, *figures, *(f"{changed[kind]} of {case['rows']}" for kind in ("plain", "exact")))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="qwen2.5-0.5b")
    native = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default=native, help="default: what torch is fast at on this CPU"
    )
    parser.add_argument("--runs", type=positive, default=7)
    add_json(parser)
    args = parser.parse_args()
    report = run(args.shape, args.dtype, args.runs)
    write_result(report, args.json, lambda: show(report))


if __name__ == "__main__":
    main()
