"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decant.protos import inference_pb2 as pb


def of_chat(tokens: Iterable[pb.TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [{**_entry(token), "top_logprobs": [_entry(top) for top in token.top]} for token in tokens],
        "refusal": None,
    }


@dataclass
class TextOffsets:
    """Where each token of a text begins, in characters. Text and tokens arrive in parts, of which either may be ahead.

    A special token that the text does not contain has no length. Tokens that are one character together begin with it.
    """

    _offset: int = 0
    _text: str = ""
    _next: int = 0
    """Index in `_text` of `_offset`; past its end where tokens are ahead."""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def add(self, text: str) -> None:
        rest = self._text[self._next :]
        self._next = max(0, self._next - len(self._text))
        self._text = rest + text

    def take(self, raw: bytes) -> int:
        """The offset of the next token, whose bytes are `raw`."""
        begin, piece = self._offset, self._decoder.decode(raw)
        if not self._follows(piece):
            piece = piece.removeprefix(" ")  # some tokenizers drop the space of the first word
        if self._follows(piece):
            self._offset += len(piece)
            self._next += len(piece)
        return begin

    def _follows(self, piece: str) -> bool:
        return piece.startswith(self._text[self._next : self._next + len(piece)])


def of_completion(tokens: Sequence[pb.TokenLogprob], offsets: TextOffsets, alternatives: int) -> dict[str, Any]:
    """`offsets` has the text of the tokens, as far as it is known. A token is among its own alternatives."""
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob if token.HasField("logprob") else None for token in tokens],
        "top_logprobs": [_alternatives(token) for token in tokens] if alternatives else None,
        "text_offset": [offsets.take(token.raw_bytes) for token in tokens],
    }


def _entry(token: pb.TokenLogprob | pb.TopLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.raw_bytes)}


def _alternatives(token: pb.TokenLogprob) -> Mapping[str, float] | None:
    if not token.HasField("logprob"):  # the first token of a prompt
        return None
    return {**{top.token: top.logprob for top in token.top}, token.token: token.logprob}
