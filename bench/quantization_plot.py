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
    milliseconds = result["milliseconds"] | {f"OpenVINO, {work}": times for work, times in result["openvino"].items()}
    plain = {work: times[PLAIN] for work, times in result["milliseconds"].items()}
    speeds = {
        work: {kind: plain[work.removeprefix("OpenVINO, ")] / time for kind, time in times.items()}
        for work, times in milliseconds.items()
    }
    scale = BARS / max(speed for each in speeds.values() for speed in each.values())
    for work, each in speeds.items():
        drawing.y += LINE // 2
        drawing.line(work, 14, font_weight="bold")
        drawing.y += LINE // 2
        for kind, speed in each.items():
            label = f"{kind}, {milliseconds[work][kind]:.1f} ms"
            colour = BASELINE_COLOUR if kind == PLAIN or work not in plain else DECANT_COLOUR
            drawing.bar(label, scale * speed, f"{speed:.2f}", colour)
    return drawing.svg()


def main() -> None:
    PICTURE.write_text(svg(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
