"""Draws docs/pictures/demo.svg from a run of `decant demo`: python -m bench.demo_picture

The picture shows the part in which the decode worker is killed, slowed down, with the pauses of the run.
"""

from __future__ import annotations

import argparse
import codecs
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from decant.command.demo import EQUAL, KILLED, KILLED_MARK

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "demo.svg"
BEGIN = f"kill -9 {KILLED}"
SHOWN_SECONDS, STILL_SECONDS = 9.0, 4.0
WIDTH, LEFT, TOP, LINE, LETTER = 860, 20, 34, 19, 8.43


class Piece(NamedTuple):
    """Text that a process wrote at once, and the seconds since its start."""

    seconds: float
    text: str


def record(command: Sequence[str]) -> list[Piece]:
    """Run a command and return what it writes. Raises CalledProcessError."""
    began, pieces, decoder = time.monotonic(), list[Piece](), codecs.getincrementaldecoder("utf-8")()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while part := os.read(process.stdout.fileno(), 1 << 16):
            pieces.append(Piece(time.monotonic() - began, decoder.decode(part)))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return pieces


def part_of(pieces: Sequence[Piece], begin: str, end: str) -> list[Piece]:
    """Pieces from ``begin`` to ``end``; times count from the piece after the first. Raises ValueError without them.

    Between those two the same request runs undisturbed, and nothing is written.
    """
    whole = "".join(piece.text for piece in pieces)
    for one in (begin, end):
        if one not in whole:
            raise ValueError(f"no line has {one!r}")
    first = whole.index(begin)
    last, at, found = whole.index(end, first) + len(end), 0, list[Piece]()
    for piece in pieces:
        text = whole[max(first, at) : min(last, at + len(piece.text))]
        if text:
            found.append(Piece(piece.seconds, text))
        at += len(piece.text)
    began = found[min(1, len(found) - 1)].seconds
    return [Piece(max(0.0, piece.seconds - began), piece.text) for piece in found]


def svg(pieces: Sequence[Piece]) -> str:
    longest = max(pieces[-1].seconds, 1e-9)
    total = SHOWN_SECONDS + STILL_SECONDS
    shapes, frames, row, column = list[str](), list[str](), 0, 0
    for index, piece in enumerate(pieces):
        share = 100 * SHOWN_SECONDS * piece.seconds / longest / total
        frames.append(f"@keyframes k{index}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}")
        for number, line in enumerate(piece.text.split("\n")):
            if number:
                row, column = row + 1, 0
            if line.strip():
                shapes.append(_text(line, row, column, f"animation:k{index} {total:g}s infinite"))
            column += len(line)
    height = TOP + (row + 2) * LINE
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    slower = SHOWN_SECONDS / longest
    title = f"decant demo: what it prints from {longest:.1f} s, {slower:.0f} times as slow"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            "<style>text{font:14px ui-monospace,Menlo,Consolas,monospace;fill:#e9ecef;white-space:pre}",
            ".kill{fill:#ff6b6b;font-weight:bold}.note{fill:#868e96}.good{fill:#69db7c}",
            *frames,
            "</style>",
            f'<rect width="100%" height="100%" rx="8" fill="#212529"/><title>{escape(title)}</title>',
            f'<text class="note" x="{LEFT}" y="22">{escape(title)}</text>',
            *shapes,
            "</svg>\n",
        ]
    )


def _text(line: str, row: int, column: int, style: str) -> str:
    kind = "kill" if KILLED_MARK in line or BEGIN in line else "good" if EQUAL in line else ""
    x, y = LEFT + column * LETTER, TOP + (row + 1) * LINE
    place = f'x="{x:.1f}" y="{y}" textLength="{len(line) * LETTER:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text xml:space="preserve" class="{kind}" {place} style="{style}">{escape(line)}</text>'


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    pieces = part_of(record([sys.executable, "-u", "-m", "decant.command", "demo"]), BEGIN, EQUAL)
    PICTURE.write_text(svg(pieces), encoding="utf-8")
    print(PICTURE)


if __name__ == "__main__":
    main()
