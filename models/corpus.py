from __future__ import annotations

import ast
import hashlib
import io
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
# Generated when the interpreter is built: they contain folders of the build machine.
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
# Generated character tables: a sixth of the text, nearly identical to each other.
GENERATED = "gencodec.py"
HELD_OUT_ONE_IN = 20
LONGEST_CLASS = 120


@dataclass(frozen=True)
class Source:
    name: str
    text: str

    @property
    def size(self) -> int:
        return len(self.text.encode())

    @property
    def held_out(self) -> bool:
        """Whether it is never trained on; depends only on the name, so it never changes."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def read_sources(root: Path) -> list[Source]:
    sources = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS & set(parts) or any(part.startswith(SKIPPED_PREFIXES) for part in parts):
            continue
        with tokenize.open(path) as file:  # honours the file's own encoding line
            text = file.read()
        if text and GENERATED not in text:
            sources.append(Source("/".join(parts), text))
    return sorted(sources, key=lambda source: source.name)


def definitions(text: str) -> list[str]:
    """Functions, methods (dedented) and short classes: they teach the model to complete a ``def``, and to stop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in string literals
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return []
    lines = list(io.StringIO(text))  # splits at line ends only, like the parser; splitlines() splits at more characters
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found += [_segment(lines, child) for child in node.body if _is_function(child)]
            if len(_segment(lines, node).splitlines()) <= LONGEST_CLASS:
                found.append(_segment(lines, node))
        elif _is_function(node):
            found.append(_segment(lines, node))
    return [segment for segment in found if segment and not segment[0].isspace()]


def _is_function(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _segment(lines: list[str], node: ast.stmt) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))


def windows(documents: list[np.ndarray], length: int, seed: int, number: int) -> np.ndarray:
    """Windows of pass ``number``: ``int64[n, length + 1]`` in random order, cut at another offset in each pass.

    Neighbours share one token, so every token of the cut but the first is a target once.
    """
    random = np.random.default_rng([seed, number, length])
    stream = np.concatenate([documents[index] for index in random.permutation(len(documents))])
    stream = stream[random.integers(length) :]
    total = (len(stream) - 1) // length
    starts = random.permutation(total) * length
    cut: np.ndarray = stream[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return cut


def batches(documents: list[np.ndarray], length: int, rows: int, seed: int) -> Iterator[np.ndarray]:
    for number in count():
        cut = windows(documents, length, seed, number)
        if len(cut) < rows:
            raise ValueError(f"corpus: {len(cut)} windows of {length} tokens, fewer than a batch of {rows}")
        for start in range(0, len(cut) - rows + 1, rows):
            yield cut[start : start + rows]
