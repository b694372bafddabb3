from __future__ import annotations

from decant.client import results
from decant.client.results import Delta, Finished, Output, Receipt, ToolCall, Usage, Waiting, only
from decant.protos import inference_pb2 as pb


class Transcript:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.seq = 0
        """Position to resume from: tokens received of all outputs."""
        self.output_seqs: list[int] = []
        """The same of each output, by index."""
        self.started: pb.Started | None = None
        self.waiting: Waiting | None = None
        """What the request waits for, if that was the router's last message."""
        self.usage: Usage | None = None
        self.receipt: Receipt | None = None
        self._finished: dict[int, Finished] = {}
        self._deltas: dict[int, list[Delta]] = {}

    @property
    def is_complete(self) -> bool:
        return self.usage is not None

    @property
    def text(self) -> str:
        """Text of the output. Raises ValueError where there are several: read `outputs` then."""
        return only(self.outputs).text if self.outputs else ""

    @property
    def reasoning(self) -> str:
        """Reasoning of the output so far. Raises ValueError where there are several outputs: read `outputs` then."""
        return only(self.outputs).reasoning if self.outputs else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the output so far. Raises ValueError where there are several outputs: read `outputs` then."""
        return only(self.outputs).tool_calls if self.outputs else ()

    @property
    def finished(self) -> Finished | None:
        """End of the output, once it is known. Raises ValueError where there are several."""
        return only(self.outputs).finished if self.outputs else None

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(
            Output(
                index=index,
                text="".join(delta.text for delta in deltas),
                token_ids=tuple(id for delta in deltas for id in delta.token_ids),
                logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
                finished=self._finished.get(index),
                tool_calls=results.joined_calls(deltas),
                reasoning="".join(delta.reasoning for delta in deltas),
            )
            for index in sorted(self._deltas.keys() | self._finished.keys())
            for deltas in [self._deltas.get(index, [])]
        )

    def _take(self, message: pb.GenerateStreamResponse) -> Delta | None:
        self.waiting = results.waiting(message.waiting) if message.HasField("waiting") else None
        if message.WhichOneof("event") in (None, "waiting"):  # None: of a newer router
            return None
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
        self.output_seqs += [0] * (delta.index + 1 - len(self.output_seqs))
        self.output_seqs[delta.index] += delta.num_tokens
        if not delta.num_tokens and deltas and not deltas[-1].num_tokens:
            return None
        deltas.append(delta)
        return delta
