"""State of a sequence besides its KV; derived from request and tokens, never transferred or stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decant.engine.guides.mask import GuideMask
from decant.engine.logits_processors import Edit, only_token
from decant.engine.request import Request


class SamplerState:
    """``reads_tokens``: whether the next draw depends on earlier draws. ``guide``: of a request with a grammar.

    ``pooled``: the computed part of an embedding, as the device returned it; None: nothing is computed.
    """

    __slots__ = ("guide", "pooled", "processors", "reads_tokens")

    def __init__(self, request: Request) -> None:
        self.pooled: Any = None
        self.processors = request.logits_processors()
        self.guide = next((each for each in self.processors if isinstance(each, GuideMask)), None)
        self.reads_tokens = any(processor.reads_tokens for processor in self.processors)

    def edits(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> list[Edit]:
        """Changes of the logits for the draw after the first ``length`` tokens, in the order to apply them."""
        return [edit for each in self.processors if (edit := each.edit(tokens, length, eos)) is not None]

    def only_token(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> int | None:
        """The token that the draw after the first ``length`` tokens returns in any case; None: there are several."""
        return only_token(self.edits(tokens, length, eos))
