from __future__ import annotations

from decant.client import results
from decant.client.results import Delta, Finished, Output, Receipt, Usage
from decant.protos import inference_pb2 as pb


class Transcript:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.seq = 0
        """Position to resume from: output tokens received."""
        self.started: pb.Started | None = None
        self.usage: Usage | None = None
        self.receipt: Receipt | None = None
        self._finished: dict[int, Finished] = {}
        self._deltas: dict[int, list[Delta]] = {}

    @property
    def is_complete(self) -> bool:
        return self.usage is not None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self._deltas.get(0, ()))

    @property
    def finished(self) -> Finished | None:
        return self._finished.get(0)

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(
            Output(
                index=index,
                text="".join(delta.text for delta in deltas),
                token_ids=tuple(id for delta in deltas for id in delta.token_ids),
                logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
                finished=self._finished.get(index),
            )
            for index in sorted(self._deltas.keys() | self._finished.keys())
            for deltas in [self._deltas.get(index, [])]
        )

    def _take(self, message: pb.GenerateStreamResponse) -> Delta | None:
        self.seq = message.seq
        if message.HasField("usage"):
            self.usage = results.plain(Usage, message.usage)
        if message.HasField("receipt"):
            self.receipt = results.plain(Receipt, message.receipt)
        event = message.WhichOneof("event")
        if event == "started":
            self.started = message.started
        elif event == "finished":
            self._finished[message.finished.index] = results.finished_as(message.finished)
        elif event == "delta":
            return self._add(results.delta(message.delta))
        return None

    def _add(self, delta: Delta) -> Delta | None:
        """Return None for text received before: a seq does not count the text without tokens of a last delta."""
        deltas = self._deltas.setdefault(delta.index, [])
        if not delta.num_tokens and deltas and not deltas[-1].num_tokens:
            return None
        deltas.append(delta)
        return delta
