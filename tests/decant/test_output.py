from __future__ import annotations

import errno
import io
import json
import re

from decant.command.deployment import processes
from decant.command.deployment.processes import Process
from decant.command.up.output import Columns, Output
from decant.command.up.screen import Screen

LINE = json.dumps({"event": "serving", "level": "info", "time": "2026-01-02T03:04:05Z", "address": "h:1"})


def test_json_gains_the_process_and_loses_nothing() -> None:
    out = io.StringIO()
    assert Output(out).line("router-1", LINE)["address"] == "h:1"
    assert json.loads(out.getvalue()) == {"process": "router-1", **json.loads(LINE)}


def test_a_line_without_json_becomes_an_event() -> None:
    for text in ("Traceback:", "[1, 2]", '"x"', ""):
        out = io.StringIO()
        Output(out).line("router-1", text)
        assert json.loads(out.getvalue()) == {"process": "router-1", "event": text}


def test_columns_are_process_event_and_fields() -> None:
    out = io.StringIO()
    output = Columns(out)
    output.line("router-1", LINE)
    output.line("decode-1", json.dumps({"event": "failed", "level": "error", "exception": "Traceback\n  of it"}))
    first, second, *trace = out.getvalue().splitlines()
    assert all(part in first for part in ("router-1", "serving", "address=h:1"))
    assert all(part in second for part in ("decode-1", "error", "failed"))
    assert [line.strip() for line in trace] == ["Traceback", "of it"]


def test_a_stream_is_cut_into_lines() -> None:
    out = io.StringIO()
    stream = Output(out).stream("up")
    stream.write('{"event": "a"}\n{"eve')
    stream.write('nt": "b"}\n')
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["a", "b"]


def test_a_reader_that_is_gone_stops_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    output = Output(Gone())
    assert output.line("router-1", LINE)["event"] == "serving"
    assert output.line("router-1", LINE)["event"] == "serving"


def test_a_full_disk_loses_lines_and_stops_nothing() -> None:
    class Full(io.StringIO):
        is_full = True

        def flush(self) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")

    for kind in (Output, Columns):
        out = Full()
        output = kind(out)
        assert output.line("router-1", LINE)["event"] == "serving"
        out.is_full = False
        output.line("router-1", json.dumps({"event": "written again"}))
        assert "written again" in out.getvalue()


class Terminal:
    """Screen of a deployment whose processes change their states."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        self.screen = Screen(self.out)
        self.states: dict[str, Process] = {}

    def up(self, event: str, **fields: object) -> None:
        self.screen.line("up", json.dumps({"event": event, "level": "info", **fields}))

    def becomes(self, name: str, state: str, percent: int | None = None) -> None:
        self.states = {**self.states, name: Process(1, state, percent)}
        self.screen.update(self.states)

    def start(self) -> None:
        self.up("starting", model="org/model")
        for name in ("decode-1", "router-1"):
            self.becomes(name, processes.STARTING)
            self.becomes(name, processes.READY)
        self.up("ready", address="h:1", openai_url="http://h:2/v1")

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.out.getvalue())


def test_a_terminal_shows_processes_address_and_what_to_try() -> None:
    terminal = Terminal()
    terminal.start()
    terminal.screen.close()
    parts = ("org/model", "decode-1", "router-1", "ready", "Ready at h:1", "http://h:2/v1", "decant generate")
    assert [part for part in parts if part not in terminal.text] == []


def test_a_terminal_shows_no_events_but_warnings_errors_and_bare_lines() -> None:
    terminal = Terminal()
    terminal.start()
    terminal.screen.line("router-1", json.dumps({"event": "request ended", "level": "info"}))
    for level in ("warning", "error"):
        terminal.screen.line("decode-1", json.dumps({"event": f"it is a [bold]{level}", "level": level, "worker": "w"}))
    terminal.screen.line("decode-1", "Fatal: bare line")
    terminal.screen.close()
    assert "request ended" not in terminal.text
    for shown in ("it is a [bold]warning", "it is a [bold]error", "worker=w", "Fatal: bare line"):
        assert shown in terminal.text


def test_a_terminal_shows_a_restart_and_the_drain_once() -> None:
    terminal = Terminal()
    terminal.start()
    terminal.becomes("decode-1", processes.LOST)
    terminal.becomes("decode-1", processes.LOADING, 40)
    terminal.becomes("decode-1", processes.READY)
    for name in ("router-1", "decode-1"):
        terminal.becomes(name, processes.DRAINING)
    assert terminal.text.count("decode-1 is ready again") == 1
    assert terminal.text.count("Draining") == 1


def test_a_start_that_fails_ends_the_progress_on_the_terminal() -> None:
    terminal = Terminal()
    terminal.up("starting", model="m")
    terminal.becomes("decode-1", processes.LOADING, 40)
    assert terminal.screen._live.is_started
    terminal.screen.close()
    assert not terminal.screen._live.is_started
