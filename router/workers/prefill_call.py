from __future__ import annotations

from typing import Any, Protocol

from decant.protos import worker_pb2 as wire
from decant.router.workers.stream_io import StreamBroken, read
from decant.runtime.background import start_task
from decant.runtime.connections.peer import UnknownMessages


class PrefillListener(Protocol):
    def on_ticket(self, ticket: wire.Ticket) -> None: ...

    def on_first_tokens(self, message: wire.FirstTokens) -> None: ...

    def on_prompt_logprobs(self, message: wire.PromptLogprobs) -> None: ...

    def on_embedding(self, message: wire.PromptEmbedding) -> None: ...

    def on_refused(self, refused: wire.Refused) -> None: ...

    def on_failed(self, failed: wire.Failed) -> None: ...

    def on_superseded(self, superseded: wire.Superseded) -> None: ...

    def on_call_ended(self, broken: StreamBroken | None) -> None:
        """Last event; ``broken`` is None if the worker ended the call."""


class PrefillCall:
    """Call of a prefill worker; its listener receives nothing after ``close``."""

    def __init__(self, stub: Any, request: wire.PrefillRequest, listener: PrefillListener) -> None:
        self._listener = listener
        self._unknown = UnknownMessages(request.worker.id)
        self._call = stub.Prefill(request)
        self._reading = start_task("prefill call", self._read(), self._on_failure, worker=request.worker.id)

    def close(self) -> None:
        """End the call, and with it the prefill, unless its KV cache is being fetched."""
        self._reading.cancel()
        self._call.cancel()

    async def _read(self) -> None:
        broken = None
        try:
            while (message := await read(self._call)) is not None:
                self._handle(message)
        except StreamBroken as error:
            broken = error
        self._listener.on_call_ended(broken)

    def _on_failure(self, error: BaseException) -> None:
        self._listener.on_call_ended(StreamBroken(f"{type(error).__name__}: {error}"))

    def _handle(self, message: wire.PrefillEvent) -> None:
        listener = self._listener
        match message.WhichOneof("event"):
            case "ticket":
                listener.on_ticket(message.ticket)
            case "first":
                listener.on_first_tokens(message.first)
            case "prompt_logprobs":
                listener.on_prompt_logprobs(message.prompt_logprobs)
            case "embedding":
                listener.on_embedding(message.embedding)
            case "refused":
                listener.on_refused(message.refused)
            case "failed":
                listener.on_failed(message.failed)
            case "superseded":
                listener.on_superseded(message.superseded)
            case None:
                self._unknown.ignore()
