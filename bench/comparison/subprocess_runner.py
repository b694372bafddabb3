"""Run a measurement in its own process.

parent                                  python -m bench.comparison.subprocess_runner MODULE
  job, one JSON object  ── stdin ──>    MODULE.measure(job, on_progress)
  {"progress": 0.25}    <── stdout ──
  {"result": {...}}     <── stdout ──   last

This module and its imports need only the standard library: a baseline's environment runs it too.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.workloads import Item

OnProgress = Callable[[float], None]

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}


@dataclass(frozen=True, slots=True)
class Job:
    model: str
    dtype: str
    threads: int
    items: tuple[Item, ...] = ()
    token_budget: int = 512
    kv_bytes: int = 1 << 30
    batch_size: int = 8
    static_batches: int = 0
    weights: str = "plain"

    @classmethod
    def from_json(cls, text: str) -> Job:
        raw = json.loads(text)
        return cls(**{**raw, "items": tuple(Item(*item) for item in raw["items"])})


SILENCE_S = 1800.0


class ChildFailed(RuntimeError):
    """A child ended without a result. The message has the end of its stderr, ``reason`` one line."""

    def __init__(self, module: str, status: int, errors: str) -> None:
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
        ended = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self.reason = (last or ended if status >= 0 else ended)[:300]
        super().__init__(f"{module} {ended} and gave no result:\n{errors[-2000:]}")


def run(
    module: str, job: Job, on_progress: OnProgress, python: Path | None = None, silence_s: float = SILENCE_S
) -> dict[str, Any]:
    """Run ``module``'s measurement. Raises ChildFailed, also if the child writes nothing for ``silence_s``."""
    env = {**os.environ, **QUIET, "OMP_NUM_THREADS": str(job.threads)}
    with tempfile.TemporaryDirectory(prefix="decant-bench-") as folder, tempfile.TemporaryFile("w+") as errors:
        if python is not None:
            # Another environment has its own dependencies; what is imported of these needs none.
            for name in ("bench", "decant"):
                (Path(folder) / name).symlink_to(ROOT / name)
            env["PYTHONPATH"] = folder
        process = subprocess.Popen(
            [str(python or sys.executable), "-m", "bench.comparison.subprocess_runner", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            cwd=folder if python else None,
            text=True,
        )
        try:
            result = _converse(process, job, on_progress, silence_s)
            if result is None:
                with suppress(subprocess.TimeoutExpired):  # after its last line the child ends shortly
                    process.wait(10)
        finally:
            process.kill()
            status = process.wait()
        if result is None:
            errors.seek(0)
            raise ChildFailed(module, status, errors.read())
        return result


def _converse(
    process: subprocess.Popen[str], job: Job, on_progress: OnProgress, silence_s: float
) -> dict[str, Any] | None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(asdict(job)))
        process.stdin.close()
    except BrokenPipeError:
        return None
    for line in _lines(process, silence_s):
        message: Mapping[str, Any] = json.loads(line)
        if "result" in message:
            return dict(message["result"])
        on_progress(message["progress"])
    return None


def _lines(process: subprocess.Popen[str], silence_s: float) -> Iterator[str]:
    assert process.stdout is not None
    line = "\n"
    while line:
        watchdog = threading.Timer(silence_s, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        if line:
            yield line


def main() -> None:
    channel = _channel()

    def send(message: Mapping[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    job = Job.from_json(sys.stdin.read())
    module = importlib.import_module(sys.argv[1])
    send({"result": module.measure(job, lambda share: send({"progress": share}))})


def _channel() -> TextIO:
    """Reserve standard output for messages; library prints go to standard error instead."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


if __name__ == "__main__":
    main()
