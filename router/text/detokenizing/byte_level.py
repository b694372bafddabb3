"""Tokens that are bytes: the ByteLevel decoder."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from tokenizers import Tokenizer

from decant.router.text.detokenizing.token_table import (
    LONGEST_CHARACTER,
    Detokenizer,
    PromptEnd,
    TokenTable,
    unfinished,
)


def _byte_letters() -> dict[str, int]:
    """Letters of GPT-2's vocabulary that stand for bytes (Radford et al., 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_letters()


def _bytes_of_letters(token: str) -> bytes:
    try:
        return bytes([_BYTES[letter] for letter in token])
    except KeyError:
        return token.encode()


class _ByteTable(dict[int, bytes]):
    def __init__(self, token_table: TokenTable, skip_special_tokens: bool) -> None:
        super().__init__()
        self._token_table = token_table
        self._skip = skip_special_tokens

    def __missing__(self, id: int) -> bytes:
        token = self._token_table.token_of(id, skip_special_tokens=self._skip) or ""
        is_added = self._token_table.is_added(id)
        data = token.encode() if is_added else _bytes_of_letters(token)
        self[id] = data
        return data


class ByteTokenTable(TokenTable):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._tables = {skip: _ByteTable(self, skip) for skip in (False, True)}

    def bytes_of(self, id: int) -> bytes:
        return self._tables[False][id]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # The library takes an added token's letters above U+00A0 for bytes.
        table = self._tables[skip_special_tokens]
        return b"".join([table[id] for id in ids]).decode(errors="replace")

    def detokenizer(self, *, skip_special_tokens: bool, after: PromptEnd | None = None) -> Detokenizer:
        return _ByteDetokenizer(self._tables[skip_special_tokens], after or PromptEnd())

    def prompt_end(self, ids: Sequence[int], *, skip_special_tokens: bool) -> PromptEnd:
        table, data = self._tables[skip_special_tokens], b""
        for id in reversed(ids):
            data = table[id] + data
            if len(data) >= LONGEST_CHARACTER:
                break
        return PromptEnd(rest=unfinished(data))

    def without_rest(self, ids: Sequence[int], end: PromptEnd) -> Sequence[int]:
        return ids  # the last one may begin with another character


class _ByteDetokenizer(Detokenizer):
    __slots__ = ("_rest", "_table")

    def __init__(self, table: _ByteTable, after: PromptEnd) -> None:
        super().__init__()
        self._table = table
        self._rest = after.rest  # of a character, three bytes at most

    def add(self, ids: Sequence[int]) -> str:
        table = self._table
        data = table[ids[0]] if len(ids) == 1 else b"".join([table[id] for id in ids])
        if self._rest:
            data = self._rest + data
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text if text.isascii() and not self._held else self._hold_back_emoji(text)

    def _last(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")
