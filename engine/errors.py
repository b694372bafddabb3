"""Exceptions of the engine.

EngineError
├── InvalidRequest      a request that can't be served: field, limit, value
├── InvalidConfig       a setting that can't be applied: field, limit, value
├── ModelRefused        a checkpoint that would give wrong output
├── AdapterRefused      an adapter that would give wrong output, or does not fit the model
├── OutOfBlocks         the blocks are in use now; retry later
├── TransferRejected    a block or commit does not match its checksum, position or length
├── UnknownSequence     no live sequence has that id
├── DeviceFailed        the device is lost or out of memory: no further step can run
└── EngineStopped       the engine's thread has ended; after a crash ``__cause__`` is set
"""

from __future__ import annotations


class EngineError(Exception):
    pass


class _OutOfLimit(EngineError):
    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field}: {limit}, got {_short(value)}")
        self.field = field
        self.limit = limit
        self.value = value


class InvalidRequest(_OutOfLimit):
    pass


class InvalidConfig(_OutOfLimit):
    pass


def check_int(field: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise InvalidConfig(field, f"a whole number, at least {minimum}", value)


class ModelRefused(EngineError):
    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model} is not served: {reason}")
        self.model = model
        self.reason = reason


class AdapterRefused(EngineError):
    def __init__(self, adapter: str, reason: str) -> None:
        super().__init__(f"adapter {adapter} is not served: {reason}")
        self.adapter = adapter
        self.reason = reason


class OutOfBlocks(EngineError):
    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} blocks, {available} are available")
        self.needed = needed
        self.available = available


class TransferRejected(EngineError):
    pass


class UnknownSequence(EngineError):
    pass


class DeviceFailed(EngineError):
    pass


class EngineStopped(EngineError):
    pass


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
