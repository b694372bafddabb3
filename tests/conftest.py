"""Settings that must precede the import of torch, and checks after each test."""

from __future__ import annotations

import gc
import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from functools import partialmethod
from typing import Any, cast, get_args
from weakref import WeakSet

import hypothesis
import pytest
from grpc.aio import _channel, _server

from decant.engine.errors import InvalidConfig
from decant.worker.settings import Build
from decant.worker.startup import cpu_build
from tests import gpu
from tests.e2e import fork_server

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # a spinning barrier waits for a thread that is not running
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not gpu.is_present():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, which transformers may do

BUILD = cast(Build, os.environ.get("DECANT_KERNELS", "auto"))
assert BUILD in get_args(Build), f"DECANT_KERNELS: {BUILD}"
cpu_build.choose(BUILD)  # other conftest.py import torch

hypothesis.settings.register_profile("decant", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("decant")


def pytest_configure() -> None:
    if BUILD == "auto":
        return
    from decant.engine.cpu.kernels import loader as native  # imports torch

    try:
        cpu_build.check(BUILD, native.kind())
    except InvalidConfig as error:
        raise pytest.UsageError(str(error)) from None


LONGEST = (
    "tests/bench/test_gpu_kit.py",
    "tests/e2e/test_every_cut.py",
    "tests/e2e/test_examples.py",
    "tests/e2e/test_install.py",
    "tests/e2e/test_previous_version.py",
    "tests/engine/cuda/test_compiling.py",
    "tests/engine/guides/test_conformance.py",
    "tests/engine/test_all_architectures.py",
    "tests/engine/test_architectures.py",
    "tests/engine/test_bits.py",
    "tests/worker/test_decode_schedules.py",
)
"""They run first: at the end one of them would leave the other processes without work."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports of torch and of all tests leave little garbage, and what they make is never garbage later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Without slow tests, preload no torch: of the tests that fork processes only slow ones use it."""
    if not any(item.get_closest_marker("slow") for item in session.items):
        fork_server.preload_without_torch()


AIO: WeakSet[Any] = WeakSet()
"""Servers and channels of grpc.aio."""


def _register(aio: Any, init: Any, *args: Any, **options: Any) -> None:
    init(aio, *args, **options)
    AIO.add(aio)


# At debug level a server that never ran logs itself while it is deallocated. pytest keeps the log records, and the
# object in the record is freed memory then: the process crashes in a later garbage collection.
logging.getLogger("grpc._cython.cygrpc").setLevel(logging.INFO)

for kind in (_server.Server, _channel.Channel):
    kind.__init__ = partialmethod(_register, kind.__init__)  # type: ignore[method-assign, assignment]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fail a test that leaves a server running or a channel open when its event loop closes, or another root log level.

    gRPC writes calls to such a server to freed memory, which may crash a later test.
    """
    yield
    level, logging.root.level = logging.root.level, logging.WARNING
    assert level == logging.WARNING, f"the root logger's level is left at {logging.getLevelName(level)}"
    unclosed = [aio for aio in AIO if aio._loop.is_closed() and _is_open(aio)]
    for aio in unclosed:
        AIO.discard(aio)
    assert not unclosed, f"not closed before its event loop: {unclosed}"


def _is_open(aio: Any) -> bool:
    return aio._server.is_running() if isinstance(aio, _server.Server) else not aio._channel.closed()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    outcomes: dict[object, set[str]] = defaultdict(set)
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in report.user_properties:
                if name == "kernels":
                    outcomes[value].add(outcome)
    if outcomes:
        parts = (f"{build} {'/'.join(sorted(ended))}" for build, ended in outcomes.items())
        terminalreporter.write_line(f"CPU kernels: {', '.join(parts)}")
