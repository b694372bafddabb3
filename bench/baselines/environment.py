"""An environment of its own for a baseline, made on first use and kept in the cache.

    vllm.txt ── pip install --no-deps ──> <cache>/decant/baselines/vllm-<hash of the file>/bin/python

The file names every package that is installed, by version, and nothing else comes in: a dependency that would bring
gigabytes for another kind of machine stays out. The hash makes another environment of other requirements; ``complete``
is written last, so that one that was broken off is made again.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import venv
from collections import deque
from collections.abc import Callable
from pathlib import Path

from bench.model_shapes import cache_folder


class NotInstallable(RuntimeError):
    """What a baseline needs could not be installed; the message is pip's reason, in a line."""


def python(requirements: Path, say: Callable[[str], None]) -> Path:
    """An interpreter that has exactly what is required. ``say`` hears what pip does. Raises NotInstallable."""
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    folder = cache_folder().parent / "baselines" / f"{requirements.stem}-{digest}"
    interpreter = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        say("a new environment")
        venv.create(folder, with_pip=True)
        _install(interpreter, requirements, say)
        (folder / "complete").touch()
    return interpreter


def _install(interpreter: Path, requirements: Path, say: Callable[[str], None]) -> None:
    install = ["-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-compile", "--requirement"]
    pip = subprocess.Popen(
        [interpreter, *install, requirements], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    told = deque[str](maxlen=200)
    try:
        assert pip.stdout is not None
        for line in pip.stdout:
            told.append(line.strip())
            say(line.strip())
        failed = pip.wait()
    finally:
        pip.kill()
        pip.wait()
    if failed:
        errors = [line for line in told if line.startswith("ERROR")] or list(told) or ["pip said nothing"]
        raise NotInstallable(errors[-1][:300])
