"""Tokens as text and bytes, and the detokenizer of one output."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

_JOINER, _FLAG = "\u200d", "[\U0001f1e6-\U0001f1ff]"
_EMOJI = "[\u2190-\u21ff\u2300-\u23ff\u25a0-\u27bf\u2900-\u297f\u2b00-\u2bff\U0001f000-\U0001f1e5\U0001f200-\U0001faff]"
_EMOJI += "[\ufe0f\u20e3\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]{0,8}"
_UNFINISHED = re.compile(
    f"(?P<joined>{_EMOJI}(?:{_JOINER}{_EMOJI}){{0,8}}{_JOINER}?)\\Z|(?<!{_FLAG})(?:{_FLAG}{{2}})*(?P<half>{_FLAG})\\Z"
)


class UnsupportedDecoder(ValueError):
    pass


class PromptEnd(NamedTuple):
    """What the text after a prompt depends on.

    has_text  whether a token of the prompt has text: the next one keeps its space
    stripped  spaces that are still removed from the beginning of the text
    then      text that the prompt's last token adds if another follows
    rest      bytes of an unfinished character at the end of the prompt
    """

    has_text: bool = False
    stripped: int = 0
    then: str = ""
    rest: bytes = b""


class Detokenizer(ABC):
    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    @abstractmethod
    def add(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character."""
        text, self._held = self._held + self._last(), ""
        return text

    @abstractmethod
    def _last(self) -> str: ...

    def _hold_back_emoji(self, new: str) -> str:
        text = self._held + new
        unfinished = _UNFINISHED.search(text) if text and text[-1] >= _JOINER else None
        end = len(text) if unfinished is None else unfinished.start(unfinished.lastgroup or 0)
        self._held = text[end:]
        return text[:end]


class TokenTable(ABC):
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_tokens = {token.content: id for id, token in added.items() if token.special and token.content}
        """Ids of the special tokens, which outputs may skip, by their text."""
        self._special = {id for id, token in added.items() if token.special}
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def find_special(self, text: str) -> str | None:
        """Find a special token in a text."""
        match = self._any_special.search(text)
        return None if match is None else match[0]

    def token_of(self, id: int, *, skip_special_tokens: bool) -> str | None:
        if skip_special_tokens and id in self._special:
            return None
        token: str | None = self._tokenizer.id_to_token(id)
        return token

    def is_added(self, id: int) -> bool:
        """Whether a token's entry is text, in no alphabet of the decoder."""
        return id in self._added

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of all ``ids``."""
        text: str = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return text

    @abstractmethod
    def bytes_of(self, id: int) -> bytes: ...

    @abstractmethod
    def detokenizer(self, *, skip_special_tokens: bool, after: PromptEnd | None = None) -> Detokenizer: ...

    @abstractmethod
    def prompt_end(self, ids: Sequence[int], *, skip_special_tokens: bool) -> PromptEnd: ...

    @abstractmethod
    def without_rest(self, ids: Sequence[int], end: PromptEnd) -> Sequence[int]:
        """``ids`` of a prompt without those that are ``end.rest`` alone."""


LONGEST_CHARACTER = 4
"""Bytes."""


def unfinished(data: bytes) -> bytes:
    """Bytes at the end that more bytes may complete to a character."""
    return data[utf_8_decode(data, "replace", False)[1] :]
