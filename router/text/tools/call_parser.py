"""Division of an output's text into calls of tools and the rest, as it arrives.

    text       until a marker of the format
    head       until the tool's name is known: it is held back, and becomes text if no call of a request's tool begins
    arguments  sent as JSON while they arrive, until they end; without a name in the head, held back until then
    tail       what closes the call

What the parser returns after k characters depends on these alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from decant.protos import inference_pb2 as pb
from decant.router.text.stop_strings import StopStrings
from decant.router.text.tools.call_format import ArgumentsReader, CallFormat, Match, Pattern, Tail, match
from decant.router.text.tools.json_arguments import ObjectEnd

_ID_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9
"""Some templates accept no other."""


@dataclass(slots=True)
class Parsed:
    """New text, new pieces of calls, and new reasoning."""

    text: str = ""
    calls: list[pb.ToolCallDelta] = field(default_factory=list)
    reasoning: str = ""

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.calls or self.reasoning)

    def extend(self, other: Parsed) -> None:
        self.text += other.text
        self.calls += other.calls
        self.reasoning += other.reasoning


def whole_calls(pieces: Sequence[pb.ToolCallDelta]) -> list[pb.ToolCall]:
    """Join the pieces of an output's calls, from its first on."""
    calls: list[pb.ToolCall] = []
    for piece in pieces:
        if piece.index == len(calls):
            calls.append(pb.ToolCall(id=piece.id, name=piece.name))
        calls[piece.index].arguments += piece.arguments
    return calls


class PlainText:
    """Parser of an output without calls."""

    def add(self, text: str) -> Parsed:
        return Parsed(text)

    def finish(self) -> Parsed:
        return Parsed()


class CallParser(PlainText):
    """``tools``: the parameters' schema of each tool that may be called, as JSON, by its name. ``hidden``: texts of
    special tokens that have no text outside of calls.
    """

    def __init__(self, form: CallFormat, tools: Mapping[str, str], key: str, hidden: Sequence[str] = ()) -> None:
        self._format = form
        self._tools = tools
        self._key = key
        self._hidden = re.compile("|".join(map(re.escape, hidden)) or "(?!)")
        self._markers = StopStrings(form.markers)
        self._marker = ""
        self._heads: Sequence[Pattern] = form.heads
        self._tails: Sequence[Tail] = ()
        self._arguments: ArgumentsReader = form.arguments("")
        self._object = ObjectEnd(0)
        self._held = ""
        self._num_calls = 0
        self._is_over = False
        self._step: Callable[[Parsed], bool] = self._in_text if form.markers else self._in_head
        """Consumes what is held; returns whether another step may follow."""

    def add(self, text: str) -> Parsed:
        self._held += text
        parsed = Parsed()
        while self._step(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """What was held back, after the last text."""
        self._is_over = True
        return self.add("")

    def _in_text(self, parsed: Parsed) -> bool:
        found = self._markers.find(self._held, 0)
        if found is not None:
            self._marker = found.stop
            self._release(parsed, found.end - len(found.stop))
            self._heads, self._step = self._format.heads, self._in_head
            return True
        kept = 0 if self._is_over else self._markers.held_length(self._held)
        self._release(parsed, len(self._held) - kept)
        return False

    def _in_head(self, parsed: Parsed) -> bool:
        found = self._first(self._heads, len(self._marker))
        if found.is_there is None:
            return False
        if not found.is_there or not set(found.names[:1]) <= set(self._tools):
            return self._reject(parsed)
        if found.names:
            self._start(parsed, found.names[0])
            self._held = self._held[found.end - len(self._format.opening) :]
            self._arguments = self._format.arguments(self._tools[found.names[0]])
            self._tails, self._step = self._format.tails, self._in_arguments
        else:
            self._object = ObjectEnd(found.end - 1)
            self._tails, self._step = self._format.object_tails, self._in_object
        return True

    def _reject(self, parsed: Parsed) -> bool:
        """What is held begins no call: its marker is text."""
        self._release(parsed, len(self._marker))
        self._marker, self._step = "", self._in_text
        return True

    def _in_arguments(self, parsed: Parsed) -> bool:
        reading = self._arguments.read(self._held, is_over=self._is_over)
        self._held = self._held[reading.length :]
        if reading.piece:
            self._piece(parsed).arguments += reading.piece
        if reading.is_ended:
            self._step = self._in_tail
        return reading.is_ended

    def _in_object(self, parsed: Parsed) -> bool:
        end = self._object.find(self._held)
        if end is None:
            return self._is_over and self._reject(parsed)
        call = _call_in(self._held[self._object.begin : end], self._tools)
        if call is None:
            return self._reject(parsed)
        self._start(parsed, call[0])
        self._piece(parsed).arguments += call[1]
        self._held, self._step = self._held[end:], self._in_tail
        return True

    def _in_tail(self, parsed: Parsed) -> bool:
        for tail in self._tails:
            found = match(tail.pattern, self._held, 0)
            if found.is_there is None and not self._is_over:
                return False
            if found.is_there:
                self._held, self._marker = self._held[found.end :], ""
                self._heads, self._step = tail.heads, self._in_head if tail.heads else self._in_text
                return True
            if found.is_there is None:
                self._held = ""
        self._marker, self._step = "", self._in_text
        return True

    def _first(self, patterns: Sequence[Pattern], position: int) -> Match:
        for pattern in patterns:
            found = match(pattern, self._held, position)
            if found.is_there or (found.is_there is None and not self._is_over):
                return found
        return Match(False)

    def _release(self, parsed: Parsed, length: int) -> None:
        parsed.text += self._hidden.sub("", self._held[:length])
        self._held = self._held[length:]

    def _start(self, parsed: Parsed, name: str) -> None:
        index = self._num_calls
        self._num_calls += 1
        parsed.calls.append(pb.ToolCallDelta(index=index, id=call_id(self._key, index), name=name))

    def _piece(self, parsed: Parsed) -> pb.ToolCallDelta:
        index = self._num_calls - 1
        if not parsed.calls or parsed.calls[-1].index != index:
            parsed.calls.append(pb.ToolCallDelta(index=index))
        return parsed.calls[-1]


def call_id(key: str, index: int) -> str:
    """Id of a call, the same wherever the output is read."""
    number = int.from_bytes(hashlib.blake2b(f"{key}/{index}".encode(), digest_size=8).digest(), "little")
    letters = ""
    for _ in range(_ID_LENGTH):
        number, letter = divmod(number, len(_ID_LETTERS))
        letters += _ID_LETTERS[letter]
    return letters


def _call_in(text: str, tools: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments in an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in tools:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, dict):
        return value["name"], json.dumps(arguments, ensure_ascii=False)
    return (value["name"], arguments) if isinstance(arguments, str) else None
