"""Operations of an engine that a handoff needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from decant.engine.request import FinishReason
from decant.engine.transfer import IncomingSequence, KvExport, TransferCommit

T = TypeVar("T")


class SequenceTransfers(Protocol):
    """Transfers of sequences; each method raises EngineError for a sequence that it cannot serve."""

    def export(self, id: str, cached_blocks: int = 0, siblings: Iterable[str] = ()) -> KvExport: ...

    def finalize(self, id: str) -> TransferCommit: ...

    def finalize_running(self, id: str, sent: int) -> TransferCommit | None: ...

    def cancel(self, id: str) -> None: ...

    def release(self, id: str) -> None: ...

    def join(self, arrival: IncomingSequence, commit: TransferCommit) -> None: ...


class TransferEngine(Protocol):
    @property
    def transfers(self) -> SequenceTransfers: ...

    def cancel(self, id: str) -> object: ...


class EngineThread(Protocol):
    async def call(
        self, command: Callable[[TransferEngine], T], undo: Callable[[TransferEngine, T], object] | None = None
    ) -> T:
        """Run a command on the engine's thread. If the caller is cancelled after it ran, ``undo`` gets the result."""
        ...

    def post(self, command: Callable[[TransferEngine], object]) -> None: ...


class SequenceEvent(Protocol):
    @property
    def id(self) -> str: ...


class SequenceEnd(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def reason(self) -> FinishReason: ...

    @property
    def detail(self) -> str: ...


class StepEvents(Protocol):
    @property
    def filled(self) -> Sequence[SequenceEvent]: ...

    @property
    def parked(self) -> Sequence[str]: ...

    @property
    def ended(self) -> Sequence[SequenceEnd]: ...
