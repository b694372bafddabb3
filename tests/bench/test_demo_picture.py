from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from bench.demo_picture import BEGIN, PICTURE, Piece, part_of, record, svg
from decant.command.demo import EQUAL, KILLED_MARK

RUN = [
    Piece(1.0, "ready\n"),
    Piece(2.0, f"{BEGIN} (soon)\n\n"),
    Piece(2.5, "a < b"),
    Piece(3.0, f"{KILLED_MARK}\n  c"),
    Piece(4.0, f"\n2 attempts | {EQUAL}\nended\n"),
]


def test_the_part_with_the_kill_is_shown_with_its_pauses() -> None:
    part = part_of(RUN, BEGIN, EQUAL)
    assert [piece.seconds for piece in part] == [0.0, 0.0, 0.5, 1.5]
    assert part[-1].text == f"\n2 attempts | {EQUAL}"
    picture = svg(part)
    ElementTree.fromstring(picture)
    shown = [
        "".join(one.itertext()) for one in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert shown[1:] == [f"{BEGIN} (soon)", "a < b", KILLED_MARK, "  c", f"2 attempts | {EQUAL}"]
    places = [int(line.split(' y="')[1].split('"')[0]) for line in picture.splitlines() if "animation:k" in line]
    assert places[1] == places[2] < places[3] < places[4]


def test_what_a_command_writes_is_recorded_and_a_failure_raised() -> None:
    assert "".join(piece.text for piece in record([sys.executable, "-c", "print('ä')"])) == "ä\n"
    with pytest.raises(Exception, match="status 3"):
        record([sys.executable, "-c", "raise SystemExit(3)"])
    slow = "import os, time; os.write(1, b'\\xc3'); time.sleep(0.1); os.write(1, b'\\xa9')"
    assert "".join(piece.text for piece in record([sys.executable, "-c", slow])) == "é"
    halves = [Piece(1.0, BEGIN[:4]), Piece(2.0, BEGIN[4:] + EQUAL[:3]), Piece(3.0, EQUAL[3:] + "\nended")]
    assert "".join(piece.text for piece in part_of(halves, BEGIN, EQUAL)) == BEGIN + EQUAL
    with pytest.raises(ValueError, match="no line has"):
        part_of(halves[:2], BEGIN, EQUAL)
    with pytest.raises(ValueError, match="no line has"):
        part_of(RUN[:1], BEGIN, EQUAL)


def test_the_picture_of_the_readme_shows_a_kill_and_an_equal_text() -> None:
    text = PICTURE.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "decode-1 killed" in text
    assert "2 attempts" in text
    assert EQUAL in text
