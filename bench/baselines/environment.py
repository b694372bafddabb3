"""The environment of a baseline, cached.

    vllm.txt ── pip install --no-deps ──> <cache>/decant/baselines/vllm-<hash of the file>/bin/python

``complete`` is written last, so an interrupted installation is repeated.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from collections import deque
from collections.abc import Callable
from pathlib import Path

from decant.bench.model_shapes import cache_folder


class NotInstallable(RuntimeError):
    pass


def python(requirements: Path, say: Callable[[str], None]) -> Path:
    """Return the interpreter of a baseline's environment; ``say`` gets pip's output. Raises NotInstallable."""
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    folder = cache_folder().parent / "baselines" / f"{requirements.stem}-{digest}"
    interpreter = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        say("a new environment")
        venv.create(folder)
        _install(interpreter, requirements, say)
        (folder / "complete").touch()
    return interpreter


def _install(interpreter: Path, requirements: Path, say: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(interpreter), "--disable-pip-version-check", "install"]
    options = ["--no-deps", "--no-compile", "--requirement", str(requirements)]
    pip = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = deque[str](maxlen=200)
    try:
        assert pip.stdout is not None
        for line in pip.stdout:
            output.append(line.strip())
            say(line.strip())
        failed = pip.wait()
    finally:
        pip.kill()
        pip.wait()
    if failed:
        errors = [line for line in output if line.startswith("ERROR")] or list(output) or ["pip printed nothing"]
        raise NotInstallable(errors[-1][:300])
