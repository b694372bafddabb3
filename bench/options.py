from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, got {value}")
    return value


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="OUT", help="file for the figures; - for standard output, and nothing else")


def write_result(result: Any, out: str | None, show: Callable[[], None]) -> None:
    """Write or show a result. `out` is `--json`: a file, "-" for JSON instead of what `show` prints, or None."""
    text = json.dumps(result, indent=1)
    if out == "-":
        print(text)
        return
    if out:
        Path(out).write_text(text + "\n", encoding="utf-8")
    show()
