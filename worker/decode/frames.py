"""Frames: the tokens of one step for one router, in packed arrays of uint32: slots, positions, tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

from decant.engine.plan import TokenLogprobs
from decant.protos import worker_pb2 as wire
from decant.runtime.packed import pack
from decant.worker.wire_codec import logprobs_to_wire

if TYPE_CHECKING:
    from decant.worker.decode.output import Output

MAX_TOKENS = 65_536


class Frame:
    __slots__ = ("logprobs", "positions", "slots", "tokens")

    def __init__(self) -> None:
        self.slots = array("I")
        self.positions = array("I")
        self.tokens = array("I")
        self.logprobs: list[wire.TokenLogprobs] = []

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        self.logprobs.append(logprobs_to_wire(len(self.tokens) - 1, logprobs))

    def message(self, step: int) -> wire.WorkerMessage:
        """Build the message in place, as protobuf copies an assigned submessage."""
        message = wire.WorkerMessage()
        frame = message.frame
        frame.step = step
        frame.slots = pack(self.slots)
        frame.positions = pack(self.positions)
        frame.tokens = pack(self.tokens)
        if self.logprobs:
            frame.logprobs.extend(self.logprobs)
        return message


def replay_frames(output: Output, start: int, step: int) -> Iterator[wire.WorkerMessage]:
    for first in range(start, len(output.tokens), MAX_TOKENS):
        frame = Frame()
        frame.tokens = output.tokens[first : first + MAX_TOKENS]
        count = len(frame.tokens)
        frame.slots = array("I", [output.slot]) * count
        position = output.request.prompt_len + first
        frame.positions = array("I", range(position, position + count))
        indexes = (index for index in range(first, first + count) if index in output.logprobs)
        frame.logprobs.extend(logprobs_to_wire(index - first, output.logprobs[index]) for index in indexes)
        yield frame.message(step)
