"""Parts of which a format of calls is made, their search in text that is still arriving, and how calls are written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from decant.router.text.tools.json_arguments import JsonObject, Reading


class Part(Enum):
    """Bounded, since text is held and read again until what follows them is known."""

    SPACE = re.compile(r"\s{0,1024}")
    NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


SPACE, NAME = Part.SPACE, Part.NAME

Pattern = Sequence[str | Part]
"""Literals, white space (none is enough) and names, in this order."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows a call, and the heads of the call that follows directly; none: text follows."""

    pattern: Pattern
    heads: Sequence[Pattern] = ()


class ArgumentsReader(Protocol):
    """Reads the arguments of one call, as their text arrives."""

    def read(self, text: str, *, is_over: bool) -> Reading: ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format of calls.

    A head has the tool's name and ends with what opens the arguments; or it has no name, and a brace opens an object
    with name and arguments. Of patterns that begin alike, the longer comes first.

    declared_by   texts in the chat template of a model that writes this format
    markers       texts that begin a call; none: only the whole output can be calls
    heads         what follows the marker
    tails         what follows the arguments, after a head with a name
    object_tails  what follows the object, after a head without
    written       how the model writes calls where a grammar requires them
    arguments     reader of the arguments, for the schema of the tool's parameters
    opening       what opens the arguments
    inner         texts within the arguments
    """

    name: str
    declared_by: Sequence[str]
    markers: Sequence[str]
    heads: Sequence[Pattern]
    tails: Sequence[Tail]
    written: WrittenCalls
    object_tails: Sequence[Tail] = ()
    arguments: Callable[[str], ArgumentsReader] = JsonObject
    opening: str = "{"
    inner: Sequence[str] = ()

    @property
    def literals(self) -> set[str]:
        tails = [*self.tails, *self.object_tails]
        patterns = [*self.heads, *(tail.pattern for tail in tails), *(head for tail in tails for head in tail.heads)]
        return {
            *self.markers,
            *self.inner,
            *(part for pattern in patterns for part in pattern if isinstance(part, str)),
        }


def written_object(arguments: str) -> Sequence[str | Slot]:
    """``{"name": "f", ARGUMENTS: {...}}``, as templates write it."""
    return ('{"name": "', TOOL, f'", "{arguments}": ', ARGUMENTS, "}")


def named_object(arguments: str) -> Pattern:
    """Head of ``{"name": "f", ARGUMENTS: {``."""
    begin: Pattern = (SPACE, "{", SPACE, '"name"', SPACE, ":", SPACE, '"', NAME, '"', SPACE, ",", SPACE)
    return (*begin, f'"{arguments}"', SPACE, ":", SPACE, "{")


OBJECT: Pattern = (SPACE, "{")


class Slot(Enum):
    """What differs between two calls."""

    TOOL = "the tool's name"
    ARGUMENTS = "the arguments, a JSON object"
    PARAMETERS = "the arguments, an element each"


TOOL, ARGUMENTS, PARAMETERS = Slot.TOOL, Slot.ARGUMENTS, Slot.PARAMETERS


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """Calls as their model writes them, for the grammar of an answer. The format's own patterns find each of them.

    call        literals and slots, of one call
    begin, end  around all calls
    between     of two calls; None: an answer has one at most
    text        begins an answer without calls
    preamble    begins and ends text before calls
    """

    call: Sequence[str | Slot]
    begin: str = ""
    end: str = ""
    between: str | None = ""
    text: str = ""
    preamble: tuple[str, str] = ("", "")


class Match(NamedTuple):
    """Whether a pattern is in the text; None: more text decides."""

    is_there: bool | None
    end: int = 0
    names: tuple[str, ...] = ()


def match(pattern: Pattern, text: str, position: int) -> Match:
    names: tuple[str, ...] = ()
    for part in pattern:
        if isinstance(part, str):
            if not text.startswith(part, position):
                rest = text[position : position + len(part)]
                return Match(None if part.startswith(rest) and position + len(rest) == len(text) else False)
            position += len(part)
            continue
        found = part.value.match(text, position)
        end = found.end() if found else position
        if end == len(text):
            return Match(None)
        if part is NAME:
            if found is None:
                return Match(False)
            names = (*names, found[0])
        position = end
    return Match(True, position, names)
