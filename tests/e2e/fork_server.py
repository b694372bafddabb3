"""Processes forked from one that has imported everything: importing torch and transformers takes a worker six seconds.

Imports and exits of whole interpreters are tested in tests/worker/test_process.py, tests/router/test_router_process.py
and tests/decant/test_up.py.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from types import MappingProxyType
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.e2e.loaded"])


def preload_without_torch() -> None:
    _CONTEXT.set_forkserver_preload(["tests.e2e.loaded_without_torch"])


class Forked:
    """Process ``python -m module arguments`` with subprocess.Popen's methods; ``environ`` extends this process's."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        stdout: int,
        stderr: int,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        start = (module, tuple(arguments), {**os.environ, **environ}, (_Sent(stdout), _Sent(stderr)))
        self._process = _CONTEXT.Process(target=_become, args=start)
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def completed(
    module: str, *arguments: str, timeout: float = 120, environ: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = Forked(module, arguments, output.fileno(), errors.fileno(), environ)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([module, *arguments], status, output.read(), errors.read())


def _become(module: str, arguments: Sequence[str], environ: Mapping[str, str], written: Sequence[Any]) -> None:
    for ours, theirs in enumerate(written, start=1):
        number = theirs.detach()
        os.dup2(number, ours)
        os.close(number)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # found by the environment before
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class _Sent:
    """A file descriptor that is duplicated into the process to which it is sent."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        sent = reduction.DupFd(self._number)
        return _itself, (sent,)


def _itself(sent: Any) -> Any:
    return sent
