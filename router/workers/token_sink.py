"""What a session does with the tokens of a run: the part of a token writer that it calls."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from decant.protos import worker_pb2 as wire


class WriteError(Enum):
    """Why a token was not written, other than that it is there already."""

    GAP = "gap"
    CONFLICT = "conflict"  # the position has another token
    MALFORMED = "malformed"  # no token of this output, or without the logprobs that the request needs


class TokenSink(Protocol):
    """Takes the tokens of one output, by position."""

    @property
    def position(self) -> int:
        """Of the first missing token."""

    @property
    def end_limit(self) -> int:
        """The position after the last token that may be written."""

    def write(self, position: int, token: int, logprobs: wire.TokenLogprobs | None = None) -> WriteError | None: ...

    def add_prompt_logprobs(self, message: wire.PromptLogprobs) -> WriteError | None:
        """Logprobs of a part of the prompt."""
