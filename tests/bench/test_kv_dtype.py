from __future__ import annotations

import json
import sys

import pytest

from bench import kv_dtype
from bench.comparison.steps import Case
from decant.models import card, corpus


def test_windows_count_each_next_token_once() -> None:
    document = list(range(23))
    counted = [piece[at + 1] for piece, first in kv_dtype.windows(document, 8) for at in range(first, len(piece) - 1)]
    assert counted == document[1:]


@pytest.mark.slow
def test_both_kinds_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kv_dtype, "CASES", {"2 of 32": Case(2, 32)})
    monkeypatch.setattr(kv_dtype, "WRITTEN", 8)
    monkeypatch.setattr(kv_dtype, "GREEDY_PROMPTS", card.GREEDY_PROMPTS[:2])
    held_out = corpus.Source("xml/sax/__init__.py", "x = 1\n" * 40)
    monkeypatch.setattr(corpus, "read_sources", lambda root: [held_out])
    arguments = ["--model", "tiny", "--runs", "1", "--threads", "1", "--kv-memory", "4", "--json", "-"]
    monkeypatch.setattr(sys, "argv", ["bench.kv_dtype", *arguments])
    kv_dtype.main()
    result = json.loads(capsys.readouterr().out)
    assert result["milliseconds"]["2 of 32"].keys() == {"auto", "int8"}
    assert result["token_bytes"]["int8"] < 0.6 * result["token_bytes"]["auto"]
    held_out, greedy = result["quality"]["held_out"], result["quality"]["greedy"]
    assert 0 < held_out["error"] < 0.1
    assert abs(held_out["perplexity"]["int8"] / held_out["perplexity"]["auto"] - 1) < 0.05
    assert greedy["undisturbed"] <= greedy["tokens"] == 16
    assert 0 < greedy["agreement"] <= 16
