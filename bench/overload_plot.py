"""Draws docs/pictures/overload.svg: python -m bench.overload_plot bench/results/overload-xeon-2026-11-27.json"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "overload.svg"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 780, 340, 60, 50, 60, 24
COLOURS = {"after": "#0b7285", "before": "#adb5bd"}
INK = "#212529"


def svg(result: Mapping[str, Any]) -> str:
    closed = result["closed_loop_per_s"]
    points = {name: [(row["rate"], row["completed_per_s"]) for row in result[name]] for name in COLOURS}
    x_most = max(x for line in points.values() for x, _ in line)
    y_most = 1.2 * max(closed, *(y for line in points.values() for _, y in line))

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * x / x_most,
            HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * y / y_most,
        )

    shapes = [_text(LEFT, 26, "Completed requests per second over offered requests per second", 16)]
    shapes.append(_text(LEFT, 46, result["what"], 12))
    shapes.append(_line([at(0, 0), at(x_most, 0)], INK))
    shapes.append(_line([at(0, 0), at(0, y_most)], INK))
    shapes.append(_line([at(0, closed), at(x_most, closed)], "#c92a2a", dashed=True))
    shapes.append(_text(at(x_most, 0)[0], at(0, closed)[1] - 6, f"64 clients: {closed:g}", 12, "end"))
    for name, line in points.items():
        shapes.append(_line([at(*point) for point in line], COLOURS[name]))
        for x, y in line:
            place = at(x, y)
            shapes.append(f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="4" fill="{COLOURS[name]}"/>')
            shapes.append(_text(place[0], place[1] + 18, f"{y:g}", 12, "middle"))
            shapes.append(_text(place[0], HEIGHT - BOTTOM + 18, f"{x:g}", 12, "middle"))
        shapes.append(_text(at(*line[-1])[0] - 10, at(*line[-1])[1] - 10, name, 13, "end", COLOURS[name]))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', *shapes, "</svg>\n"])


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def _line(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 3"' if dashed else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'


def main() -> None:
    PICTURE.write_text(svg(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
