"""Tokens that are pieces of text, or single bytes between them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from decant.router.text.detokenizing.decoders import decoder_of
from decant.router.text.detokenizing.token_table import (
    LONGEST_CHARACTER,
    Detokenizer,
    PromptEnd,
    TokenTable,
    unfinished,
)

_ANCHOR = "a"
"""Every decoder takes it as it is: what stands next to it shows what the decoder makes of others."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Piece(NamedTuple):
    """Text of a token, and text that is added only if another token follows."""

    text: str
    then: str


_Entry = _Piece | int | None
"""None: no text."""


class _PieceTable(dict[int, _Entry]):
    """Pieces of tokens anywhere but at the beginning, by id."""

    def __init__(self, token_table: PieceTokenTable, skip_special_tokens: bool) -> None:
        super().__init__()
        self.token_table = token_table
        self.skip = skip_special_tokens

    def __missing__(self, id: int) -> _Entry:
        entry = self[id] = self.token_table.entry(id, skip_special_tokens=self.skip)
        return entry

    def first(self, id: int) -> _Entry:
        return self.token_table.entry(id, skip_special_tokens=self.skip, first=True)


class PieceTokenTable(TokenTable):
    def __init__(
        self, tokenizer: Tokenizer, steps: Sequence[Mapping[str, Any]], *, has_bytes: bool, stripped: int
    ) -> None:
        super().__init__(tokenizer)
        self._stripped = stripped
        self._has_bytes = has_bytes
        self._decoder = decoder_of(steps) if tokenizer.decoder is not None else None
        self._tables = {skip: _PieceTable(self, skip) for skip in (False, True)}

    def entry(self, id: int, *, skip_special_tokens: bool, first: bool = False) -> _Entry:
        token = self.token_of(id, skip_special_tokens=skip_special_tokens)
        if token is None:
            return None
        before = [] if first else [_ANCHOR]
        last = self._decode([*before, token])
        if self._has_bytes and (byte := _BYTE.fullmatch(last if first else last[1:])):
            return int(byte[1], 16)
        behind = len(self._decode([_ANCHOR, _ANCHOR])) - 1
        inside = self._decode([*before, token, _ANCHOR])
        return _Piece(last[len(before) :], inside[len(last) : len(inside) - behind])

    def bytes_of(self, id: int) -> bytes:
        match self._tables[False][id]:
            case None:
                return b""
            case _Piece(text, then):
                return (text + then).encode()
            case byte:
                return bytes([byte])

    def detokenizer(self, *, skip_special_tokens: bool, after: PromptEnd | None = None) -> Detokenizer:
        return _PieceDetokenizer(self._tables[skip_special_tokens], after or PromptEnd(stripped=self._stripped))

    def prompt_end(self, ids: Sequence[int], *, skip_special_tokens: bool) -> PromptEnd:
        table, left, first = self._tables[skip_special_tokens], self._stripped, None
        for index, id in enumerate(ids):
            entry = table[id] if first is not None else table.first(id)
            if entry is None:
                continue
            first = index if first is None else first
            text = chr(entry) if isinstance(entry, int) else entry.text
            spaces = len(text) - len(text.lstrip(" "))
            left = max(0, left - spaces) if spaces == len(text) else 0
            if not left:
                break
        if first is None:
            return PromptEnd(stripped=self._stripped)
        run = bytearray()
        for index in range(len(ids) - 1, first - 1, -1):
            entry = table[ids[index]] if index > first else table.first(ids[index])
            if isinstance(entry, int):
                run.insert(0, entry)
            elif entry is not None and not run:
                return PromptEnd(True, left, then=entry.then)
            elif entry is not None or len(run) >= LONGEST_CHARACTER:
                break
        return PromptEnd(True, left, rest=unfinished(bytes(run)))

    def without_rest(self, ids: Sequence[int], end: PromptEnd) -> Sequence[int]:
        of_bytes = [index for index, id in enumerate(ids) if isinstance(self._tables[False][id], int)]
        dropped = frozenset(of_bytes[len(of_bytes) - len(end.rest) :])
        return [id for index, id in enumerate(ids) if index not in dropped]

    def _decode(self, tokens: list[str]) -> str:
        text: str = " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)
        return text


class _PieceDetokenizer(Detokenizer):
    __slots__ = ("_has_begun", "_run", "_stripped", "_table", "_then")

    def __init__(self, table: _PieceTable, after: PromptEnd) -> None:
        super().__init__()
        self._table = table
        self._has_begun = after.has_text
        self._run = bytearray(after.rest)
        self._then = after.then
        self._stripped = after.stripped  # spaces still to remove from the beginning

    def add(self, ids: Sequence[int]) -> str:
        text = "".join([self._next(id) for id in ids])
        return self._hold_back_emoji(self._strip(text) if self._stripped else text)

    def _last(self) -> str:
        self._then = ""
        return self._strip(self._take_run())

    def _next(self, id: int) -> str:
        entry = self._table[id] if self._has_begun else self._table.first(id)
        if entry is None:
            return ""
        self._has_begun = True
        if isinstance(entry, int):
            self._run.append(entry)
            return ""
        before = self._take_run() if self._run else self._then
        self._then = entry.then
        return before + entry.text

    def _take_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        for place, letter in enumerate(text):
            if not self._stripped or letter != " ":
                self._stripped = 0
                return text[place:]
            self._stripped -= 1
        return ""
