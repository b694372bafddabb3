from __future__ import annotations

import io
import json

from decant.command.up.output import Output

LINE = json.dumps({"event": "serving", "level": "info", "time": "2026-01-02T03:04:05Z", "address": "h:1"})


def test_json_gains_the_process_and_loses_nothing() -> None:
    out = io.StringIO()
    assert Output(out, console=False).line("router-1", LINE)["address"] == "h:1"
    assert json.loads(out.getvalue()) == {"process": "router-1", **json.loads(LINE)}


def test_a_line_without_json_becomes_an_event() -> None:
    for text in ("Traceback:", "[1, 2]", '"x"', ""):
        out = io.StringIO()
        Output(out, console=False).line("router-1", text)
        assert json.loads(out.getvalue()) == {"process": "router-1", "event": text}


def test_columns_are_process_event_and_fields() -> None:
    out = io.StringIO()
    output = Output(out, console=True)
    output.line("router-1", LINE)
    output.line("decode-1", json.dumps({"event": "failed", "level": "error", "exception": "Traceback\n  of it"}))
    first, second, *trace = out.getvalue().splitlines()
    assert all(part in first for part in ("router-1", "serving", "address=h:1"))
    assert all(part in second for part in ("decode-1", "error", "failed"))
    assert [line.strip() for line in trace] == ["Traceback", "of it"]


def test_a_stream_is_cut_into_lines() -> None:
    out = io.StringIO()
    stream = Output(out, console=False).stream("up")
    stream.write('{"event": "a"}\n{"eve')
    stream.write('nt": "b"}\n')
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["a", "b"]


def test_a_reader_that_is_gone_stops_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    output = Output(Gone(), console=False)
    assert output.line("router-1", LINE)["event"] == "serving"
    assert output.line("router-1", LINE)["event"] == "serving"
