from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

from bench.comparison.contenders import CONTENDERS, DECANT, title_of
from bench.comparison.table import workloads_of

WIDTH, MARGIN = 780, 24
LABELS, FIGURES = 240, 60

ORDER = (DECANT, *reversed([name for name in CONTENDERS if name != DECANT]))

BARS = WIDTH - 2 * MARGIN - LABELS - FIGURES
BAR, ROW, LINE = 20, 28, 20
INK, DECANT_COLOUR, BASELINE_COLOUR, LIMIT_COLOUR = "#212529", "#0b7285", "#adb5bd", "#c92a2a"


class Drawing:
    def __init__(self) -> None:
        self.y = MARGIN
        self._shapes: list[str] = []

    def text(self, x: float, y: float, text: str, size: int = 13, **style: str) -> None:
        attributes = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in {"fill": INK, **style}.items())
        self._shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{attributes}>{escape(text)}</text>')

    def line(self, text: str, size: int = 13, **style: str) -> None:
        self.y += LINE
        self.text(MARGIN, self.y, text, size, **style)

    def bar(self, label: str, length: float, figure: str, colour: str) -> None:
        middle = self.y + BAR / 2 + 5
        self.text(MARGIN + LABELS - 10, middle, label, text_anchor="end")
        size = f'width="{max(1.0, length):.1f}" height="{BAR}"'
        self._shapes.append(f'<rect x="{MARGIN + LABELS}" y="{self.y}" {size} fill="{colour}"/>')
        self.text(WIDTH - MARGIN, middle, figure, text_anchor="end")
        self.y += ROW

    def rule(self, x: float, top: float) -> None:
        ends = f'x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{self.y:.1f}"'
        self._shapes.append(f'<line {ends} stroke="{LIMIT_COLOUR}" stroke-width="2" stroke-dasharray="5 3"/>')

    def svg(self) -> str:
        height = self.y + MARGIN
        size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">'
        return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *self._shapes, "</svg>\n"])


def svg(result: Mapping[str, Any]) -> str:
    drawing = Drawing()
    drawing.line(f"Output tokens per second: {result['model_id']}, {result['dtype']}", 16, font_weight="bold")
    drawing.line(f"{result['machine']['cpu']}, {result['threads']} threads, {result['date'][:10]}")
    for name, workload in workloads_of(result).items():
        _panel(drawing, name, workload)
    for contender, reason in result["unavailable"].items():
        drawing.line(f"{title_of(contender)} was left out: {reason[:80]}", 11)
    return drawing.svg()


def _panel(drawing: Drawing, name: str, workload: Mapping[str, Any]) -> None:
    measured = workload["contenders"]
    rates = {contender: measured[contender]["output_throughput"] for contender in ORDER if contender in measured}
    limit = workload["allowed"] and workload["allowed"]["output_throughput"]
    scale = BARS / max(*rates.values(), limit or 0.0)
    drawing.y += LINE // 2
    drawing.line(name, 14, font_weight="bold")
    drawing.y += LINE // 2
    top = drawing.y
    for contender, rate in rates.items():
        colour = DECANT_COLOUR if contender == DECANT else BASELINE_COLOUR
        drawing.bar(title_of(contender), scale * rate, f"{rate:.1f}", colour)
    if limit:
        x = MARGIN + LABELS + scale * limit
        drawing.rule(x, top - 4)
        drawing.y += LINE // 2
        drawing.text(x, drawing.y + 4, f"the machine allows {limit:.1f}", 12, text_anchor="end", fill=LIMIT_COLOUR)
        drawing.y += LINE // 2
