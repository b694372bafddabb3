"""Incremental detokenizing: whole characters, as soon as later tokens can't change them.

    decoder                         a token is             what is held back
    ByteLevel                       some bytes             an incomplete character
    with ByteFallback               text, or one byte      a run of bytes: one bad byte spoils all of a run
    Metaspace, WordPiece, Replace,  text; the first may    nothing
      Strip, none                     lack its space
    BPEDecoder                      text and a space       the space: the last token has none

All pieces together are what ``Tokenizer.decode`` returns; after a prompt, its text and they are what that returns for
all tokens. But an added token with accents is its text, whose letters the library's ByteLevel takes for bytes.
An emoji that may continue (a joiner, a skin tone, half a flag) is held back until the next character.

Not `tokenizers.decoders.DecodeStream`: it loses what it holds back at the end, and it divides emoji.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers import models as kinds
from tokenizers.decoders import Decoder

from decant.router.text.tokenizer_steps import flat_steps

_ANCHOR = "a"
"""Every decoder takes it as it is: what stands next to it shows what the decoder makes of others."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ONE_BY_ONE = frozenset({"Replace", "Metaspace", "WordPiece", "Strip", "BPEDecoder"})

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


def make_token_table(tokenizer: Tokenizer) -> TokenTable:
    steps = list(flat_steps(_described(tokenizer.decoder), "decoders"))
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return _ByteTokenTable(tokenizer)
    stripped = 0
    if "Fuse" in names:
        fuse = names.index("Fuse")
        stripped = _stripped(steps[fuse + 1 :])
        steps, names = steps[:fuse], names[:fuse]
    has_bytes = names[-1:] == ["ByteFallback"]
    for name in names[:-1] if has_bytes else names:
        if name not in _ONE_BY_ONE or (has_bytes and name == "BPEDecoder"):
            raise UnsupportedDecoder(f"a decoder with {name} in this place can't be followed token by token")
    return _PieceTokenTable(tokenizer, steps[:-1] if has_bytes else steps, has_bytes=has_bytes, stripped=stripped)


_LONGEST_CHARACTER = 4
"""Bytes."""


def _unfinished(data: bytes) -> bytes:
    """Bytes at the end that more bytes may complete to a character."""
    return data[utf_8_decode(data, "replace", False)[1] :]


# ---------------------------------------------------------------------------------------------- byte level


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


class _ByteTokenTable(TokenTable):
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
            if len(data) >= _LONGEST_CHARACTER:
                break
        return PromptEnd(rest=_unfinished(data))

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


# -------------------------------------------------------------------------------------------------- pieces


class _Piece(NamedTuple):
    """Text of a token, and text that is added only if another token follows."""

    text: str
    then: str


_Entry = _Piece | int | None
"""None: no text."""


class _PieceTable(dict[int, _Entry]):
    """Pieces of tokens anywhere but at the beginning, by id."""

    def __init__(self, token_table: _PieceTokenTable, skip_special_tokens: bool) -> None:
        super().__init__()
        self.token_table = token_table
        self.skip = skip_special_tokens

    def __missing__(self, id: int) -> _Entry:
        entry = self[id] = self.token_table.entry(id, skip_special_tokens=self.skip)
        return entry

    def first(self, id: int) -> _Entry:
        return self.token_table.entry(id, skip_special_tokens=self.skip, first=True)


class _PieceTokenTable(TokenTable):
    def __init__(
        self, tokenizer: Tokenizer, steps: Sequence[Mapping[str, Any]], *, has_bytes: bool, stripped: int
    ) -> None:
        super().__init__(tokenizer)
        self._stripped = stripped
        self._has_bytes = has_bytes
        self._decoder = _decoder(steps) if tokenizer.decoder is not None else None
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
            elif entry is not None or len(run) >= _LONGEST_CHARACTER:
                break
        return PromptEnd(True, left, rest=_unfinished(bytes(run)))

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


# -------------------------------------------------------------------------------------- decoders, described


def _described(decoder: Decoder | None) -> Any:
    bare = Tokenizer(kinds.BPE())
    if decoder is not None:
        bare.decoder = decoder
    return json.loads(bare.to_str())["decoder"]


def _decoder(steps: Sequence[Mapping[str, Any]]) -> Decoder:
    described = json.loads(Tokenizer(kinds.BPE()).to_str())
    described["decoder"] = {"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}]}
    decoder: Decoder = Tokenizer.from_str(json.dumps(described)).decoder
    return decoder


def _stripped(steps: Sequence[Mapping[str, Any]]) -> int:
    stripped = 0
    for step in steps:
        if step["type"] != "Strip" or step["content"] != " " or step["stop"]:
            raise UnsupportedDecoder(f"a decoder with {step['type']} after Fuse can't be followed token by token")
        stripped += step["start"]
    return stripped
