from __future__ import annotations

import json
from pathlib import Path

import pytest

from decant.plan import recorded_workload
from decant.plan.errors import InvalidPlan
from decant.plan.recorded_workload import RecordedLengths, Trace, TraceRequest
from tests.plan.test_plan_command import A100, plan, run

REQUESTS = ((10.0, 100, 20), (10.5, 300, 10), (12.0, 200, 60))
CSV = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{a},{p},{o}\n" for a, p, o in REQUESTS)


def trace(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


EXPECTED = Trace((TraceRequest(0.0, 100, 20), TraceRequest(0.5, 300, 10), TraceRequest(2.0, 200, 60)))


@pytest.mark.parametrize(
    "text",
    [
        CSV,
        lines(*({"arrival_s": a, "prompt_tokens": p, "output_tokens": o} for a, p, o in reversed(REQUESTS))),
        lines(*({"arrival_s": a, "prompt_token_ids": [7] * p, "output_len": o} for a, p, o in REQUESTS)),
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:10.0000000,100,20\n2023-11-16 18:17:10.500000,300,10\n2023-11-16 18:17:12,200,60\n",
    ],
)
def test_every_format_gives_the_same_requests_in_order_of_arrival(text: str, tmp_path: Path) -> None:
    assert recorded_workload.read(trace(tmp_path, text)) == EXPECTED


def test_rate_and_lengths_are_those_of_the_requests() -> None:
    assert EXPECTED.rate == 1.0
    assert EXPECTED.longest == 310
    assert (EXPECTED.prompt.low, EXPECTED.prompt.high, EXPECTED.prompt.mean) == (100, 300, 200)
    lengths = RecordedLengths((1, 2, 6))
    assert lengths.mean_square == pytest.approx(41 / 3)
    assert lengths.mean_of(lambda tokens: tokens**3) == pytest.approx(225 / 3)


def test_a_plan_uses_the_rate_and_lengths_of_a_trace(tmp_path: Path) -> None:
    path = str(trace(tmp_path, CSV))
    document = plan(*A100, "--trace", path)
    assert document["workload"] == {
        "prompt": {"low": 100, "high": 300, "mean": 200},
        "output": {"low": 10, "high": 60, "mean": 30},
        "rate": 1.0,
        "quantile": 0.99,
    }
    assert plan(*A100, "--trace", path, "--rate", "5")["workload"]["rate"] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s,prompt_tokens\n1,2\n", "--trace line 2: one of output_tokens, GeneratedTokens"),
        (CSV + "13,0,5\n", "--trace line 5: prompt_tokens: a whole number of tokens from 1, got 0"),
        (CSV + "soon,1,5\n", "--trace line 5: arrival_s: seconds, or a date and time in ISO 8601, got soon"),
        (CSV + "nan,1,5\n", "--trace line 5: arrival_s: finite seconds, got nan"),
        (lines({"arrival_s": 0, "prompt_tokens": 1.5, "output_tokens": 1}), "line 1: prompt_tokens: a whole number"),
        ('{"arrival_s": 0,\n', "--trace line 1: a JSON object"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,3\n1,2,3\n", "--trace: at least two requests, at different times"),
    ],
)
def test_an_invalid_trace_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan) as error:
        recorded_workload.read(trace(tmp_path, text))
    assert message in str(error.value)


def test_lengths_beside_a_trace_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = str(trace(tmp_path, CSV))
    status, output = run(*A100, "--trace", path, "--output-tokens", "9")
    assert status == 1
    assert "--trace: without --prompt-tokens and --output-tokens" in output
    status, output = run(*A100, "--trace", str(tmp_path / "none"))
    assert status == 1
    assert "--trace: a readable file" in output
