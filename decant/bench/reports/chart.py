"""Charts as inline SVG: a report is one file that loads nothing, and `decant bench` needs no plotting package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 40, 46
COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c92a2a", "#868e96")
_TICKS = 5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis from 0 to `end`, with numbers or with the `names` of its unit ranges."""

    title: str
    end: float
    names: Sequence[str] = ()

    @property
    def step(self) -> float:
        if self.names:
            return 1.0
        rough = max(self.end, 1e-9) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)

    @property
    def ticks(self) -> list[float]:
        count = math.ceil(self.end / self.step - 1e-9)
        return [index * self.step for index in range(max(count, 1) + 1)]


class Chart:
    def __init__(self, title: str, x: Axis, y: Axis) -> None:
        self._shapes: list[str] = []
        self._legend = 0
        self._x_end, self._y_end = x.ticks[-1], y.ticks[-1]
        self._text(LEFT, 18, title, weight="bold", size=14)
        for tick in y.ticks:
            self._line((LEFT, self._y(tick)), (WIDTH - RIGHT, self._y(tick)), "#dee2e6")
            self._text(LEFT - 6, self._y(tick) + 4, f"{tick:g}", anchor="end")
        middles = [(index + 0.5, name) for index, name in enumerate(x.names)]
        for at, name in middles or [(tick, f"{tick:g}") for tick in x.ticks]:
            self._text(self._x(at), HEIGHT - BOTTOM + 16, name, anchor="middle")
        self._line((LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM), "#495057")
        self._text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x.title, anchor="middle")
        self._text(LEFT, TOP - 6, y.title)

    def line(self, label: str, points: Points, colour: str) -> None:
        at = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        self._shapes.append(f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="2"/>')
        self.points(points, colour)
        self._entry(label, colour)

    def points(self, points: Points, colour: str) -> None:
        for x, y in points:
            self._shapes.append(f'<circle cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="3" fill="{colour}"/>')

    def bar(self, x: tuple[float, float], y: tuple[float, float], colour: str) -> None:
        left, right, low, high = self._x(x[0]), self._x(x[1]), self._y(y[0]), self._y(y[1])
        size = f'width="{max(right - left - 1, 1):.1f}" height="{max(low - high, 0):.1f}"'
        self._shapes.append(f'<rect x="{left:.1f}" y="{high:.1f}" {size} fill="{colour}"/>')

    def limit(self, label: str, y: float) -> None:
        if y <= self._y_end:
            self._line((LEFT, self._y(y)), (WIDTH - RIGHT, self._y(y)), COLOURS[4], dash="5 3")
            self._text(WIDTH - RIGHT, self._y(y) - 4, label, anchor="end", colour=COLOURS[4])

    def legend(self, entries: Mapping[str, str]) -> None:
        for label, colour in entries.items():
            self._entry(label, colour)

    def svg(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        return "\n".join([head, *self._shapes, "</svg>"])

    def _x(self, x: float) -> float:
        return LEFT + x / self._x_end * (WIDTH - LEFT - RIGHT)

    def _y(self, y: float) -> float:
        return HEIGHT - BOTTOM - y / self._y_end * (HEIGHT - TOP - BOTTOM)

    def _entry(self, label: str, colour: str) -> None:
        x = WIDTH - RIGHT - 96 * (self._legend + 1)
        self._legend += 1
        self._shapes.append(f'<rect x="{x}" y="{TOP - 16}" width="10" height="10" fill="{colour}"/>')
        self._text(x + 14, TOP - 7, label)

    def _line(self, begin: tuple[float, float], end: tuple[float, float], colour: str, dash: str = "none") -> None:
        ends = f'x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
        self._shapes.append(f'<line {ends} stroke="{colour}" stroke-dasharray="{dash}"/>')

    def _text(self, x: float, y: float, text: str, anchor: str = "start", **look: object) -> None:
        looks = {"font-size": look.get("size", 11), "font-weight": look.get("weight", "normal")}
        styles = " ".join(f'{name}="{value}"' for name, value in looks.items())
        colour = look.get("colour", "#212529")
        where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
        self._shapes.append(f"<text {where} {styles}>{escape(text)}</text>")
