"""Everything that the engine raises on purpose.

EngineError
├── InvalidRequest      a request that this engine can't take: field, limit, value
├── InvalidConfig       a setting that can't be honoured: field, limit, value
├── ModelRefused        a checkpoint that would not be served right: what it is, what differed
├── NoRoom              not now: the blocks are in use; ask again later
├── TransferRejected    bytes or a seal that do not agree with their sums
├── UnknownSequence     nothing of that name lives here
└── EngineStopped       the engine's thread has ended; nothing more will be answered
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


class _OutOfLimit(EngineError):
    """A named field whose value breaks a named limit."""

    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field}: {limit}, got {_short(value)}")
        self.field = field
        self.limit = limit
        self.value = value


class InvalidRequest(_OutOfLimit):
    """A request refused when it was added; nothing of it was kept."""


class InvalidConfig(_OutOfLimit):
    """A setting refused at start."""


def check_whole(field: str, value: object, least: int) -> None:
    """Raises InvalidConfig for anything but a whole number from ``least`` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidConfig(field, f"a whole number, at least {least}", value)


class ModelRefused(EngineError):
    """A checkpoint that this engine will not serve, with what it is and what differed."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model} is not served: {reason}")
        self.model = model
        self.reason = reason


class OutOfBlocks(EngineError):
    """The blocks that this needs are in use now; it fits once some are freed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} blocks, {available} are available")
        self.needed = needed
        self.available = available


class TransferRejected(EngineError):
    """An imported block or seal that does not agree with its sum, its place or its length."""


class UnknownSequence(EngineError):
    """No sequence of that id is alive here."""


class EngineStopped(EngineError):
    """The engine's thread has ended, by request or by a crash; the cause is chained."""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
