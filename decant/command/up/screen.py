from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from decant import models
from decant.command.deployment import processes
from decant.command.deployment.processes import Process
from decant.command.up.output import Columns

_BAR_WIDTH = 20
_ALWAYS_SHOWN = {"warning", "error", "critical"}
_STYLES = {processes.READY: "green", processes.LOST: "red", processes.DRAINING: "yellow"}


class Screen(Columns):
    """Output for a person at a terminal: the progress of each process until the deployment is ready, its address and
    what to try; then warnings, errors, and processes that are ready again.
    """

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._console = Console(file=out, highlight=False, soft_wrap=True)
        self._model = ""
        self._processes: Mapping[str, Process] = {}
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._has_started = False
        self._is_ending = False
        self._live = Live(console=self._console, refresh_per_second=8, get_renderable=self._progress)

    def update(self, current: Mapping[str, Process]) -> None:
        if self._has_started:
            self._show_changes(current)
        now = time.monotonic()
        for name, process in current.items():
            began = self._began.setdefault(name, now)
            if process.is_ready:
                self._took.setdefault(name, now - began)
        self._processes = current

    def close(self) -> None:
        self._end_progress()

    def _show(self, process: str, fields: Mapping[str, Any]) -> None:
        match process, fields.get("event"):
            case "up", "starting":
                self._model = str(fields["model"])
                self._print(f"Starting {_model_name(self._model)} (Ctrl-C ends it)\n")
                self._live.start()
            case "up", "ready":
                self._end_progress()
                self._has_started = True
                self._print(_summary(self._model, fields))
            case _ if fields.get("level") in _ALWAYS_SHOWN or fields.keys() == {"event"}:
                self._print(self.columns(process, fields), markup=False)

    def _show_changes(self, current: Mapping[str, Process]) -> None:
        for name, process in current.items():
            before = self._processes.get(name)
            if process.is_ready and before is not None and not before.is_ready:
                self._print(f"{name} is ready again.")
        if not self._is_ending and any(one.state == processes.DRAINING for one in current.values()):
            self._is_ending = True
            self._print("Draining: running answers end first. A second Ctrl-C ends them.")

    def _progress(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, process in self._processes.items():
            seconds = self._took.get(name, time.monotonic() - self._began[name])
            state = Text(process.state, style=_STYLES.get(process.state, ""))
            bar = "" if process.percent is None else ProgressBar(100, process.percent, width=_BAR_WIDTH)
            table.add_row(f"  {name}", state, f"{seconds:.0f} s", bar)
        return table

    def _end_progress(self) -> None:
        if self._live.is_started:
            self._live.refresh()
            self._live.stop()

    def _print(self, text: str, *, markup: bool = True) -> None:
        if self._broken:
            return
        try:
            self._console.print(Text.from_ansi(text) if not markup else text)
        except (OSError, ValueError):  # the terminal was closed
            self._broken = True


def _model_name(model: str) -> str:
    return Path(model).name if Path(model).is_dir() else model


def _summary(model: str, fields: Mapping[str, Any]) -> str:
    urls = [str(fields[name]) for name in ("gateway_url", "openai_url") if name in fields]
    openai = f"\nOpenAI clients: [bold]{', '.join(urls)}[/bold]" if urls else ""
    prompt = _small_model_prompt() if model == str(models.path()) else '"Once upon a time"'
    return f"""
Ready at [bold]{fields["address"]}[/bold].{openai}

In a second terminal, ask for an answer, see what each worker does, or who is there:
  decant generate {prompt}
  decant top
  decant status
Log lines: decant up --log-format console. Ctrl-C ends the deployment.
"""


def _small_model_prompt() -> str:
    return (
        f"$'{models.PROMPT.encode('unicode_escape').decode()}' --temperature {models.TEMPERATURE} --seed {models.SEED}"
    )
