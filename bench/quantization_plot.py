"""Draws docs/pictures/quantization.svg: python -m bench.quantization_plot RESULT.json, a file of bench.quantization."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.comparison.plot import BARS, BASELINE_COLOUR, DECANT_COLOUR, LINE, Drawing

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "quantization.svg"
PLAIN = "bfloat16"


def svg(result: Mapping[str, Any]) -> str:
    drawing = Drawing()
    drawing.line(f"Speed with quantized weights, beside {PLAIN}: {result['model_id']}", 16, font_weight="bold")
    drawing.line(f"{result['machine']['cpu']}, {result['threads']} threads")
    own = result["milliseconds"]
    contenders = {"Decant": own, **result["peers"]}
    rows = [
        (title, work, kind, time, own[work][PLAIN] / time)
        for work in own
        for title, cases in contenders.items()
        for kind, time in cases[work].items()
    ]
    scale = BARS / max(speed for *_, speed in rows)
    shown = ""
    for title, work, kind, time, speed in rows:
        if shown != (shown := work if title == "Decant" else f"{title}, {work}"):
            drawing.y += LINE // 2
            drawing.line(shown, 14, font_weight="bold")
            drawing.y += LINE // 2
        colour = BASELINE_COLOUR if kind == PLAIN or title != "Decant" else DECANT_COLOUR
        drawing.bar(f"{kind}, {time:.1f} ms", scale * speed, f"{speed:.2f}", colour)
    return drawing.svg()


def main() -> None:
    PICTURE.write_text(svg(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
