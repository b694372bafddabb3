"""Exceptions of the engine.

EngineError
├── InvalidRequest      a request that this engine can't serve: field, limit, value
├── InvalidConfig       a setting that can't be applied: field, limit, value
├── ModelRefused        a checkpoint that would give wrong output: which, and what differed
├── OutOfBlocks         the blocks are in use now; retry later
├── TransferRejected    a block or a transfer commit that does not match its checksum
├── UnknownSequence     no live sequence has that id
├── DeviceFailed        the device is lost, or its memory is exhausted: the engine ends
└── EngineStopped       the engine's thread has ended; no further command runs
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class of the engine's errors."""


class _OutOfLimit(EngineError):
    """``field`` has a ``value`` that breaks ``limit``."""

    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field}: {limit}, got {_short(value)}")
        self.field = field
        self.limit = limit
        self.value = value


class InvalidRequest(_OutOfLimit):
    """A request refused by ``Engine.add``; nothing of it was kept."""


class InvalidConfig(_OutOfLimit):
    """A setting refused at start-up."""


def check_whole(field: str, value: object, least: int) -> None:
    """Raises InvalidConfig unless ``value`` is an int of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidConfig(field, f"a whole number, at least {least}", value)


class ModelRefused(EngineError):
    """A checkpoint that this engine does not serve, and the reason."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model} is not served: {reason}")
        self.model = model
        self.reason = reason


class OutOfBlocks(EngineError):
    """The needed blocks are in use now; a retry may succeed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} blocks, {available} are available")
        self.needed = needed
        self.available = available


class TransferRejected(EngineError):
    """An imported block or commit that does not match its checksum, position or length."""


class UnknownSequence(EngineError):
    """No live sequence has that id."""


class DeviceFailed(EngineError):
    """The device is lost or its memory is exhausted: no step of this process can run. Another worker has to go on."""


class EngineStopped(EngineError):
    """The engine's thread has ended, on request or by a crash (then ``__cause__`` is set)."""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
