"""Lower bound of a text's number of tokens, from its length: a text that can't fit is refused untokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from decant.router.text.tokenizer_steps import flat_steps

_COMPOSED = 4
"""Most code points that canonical composition joins into one (longest canonical decomposition, UAX #15)."""
_KEEPS_LENGTH = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
_KEEPS_ALL = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_DROPS_SPACES = frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer"})
_SLICE = 1 << 16
"""Characters counted in one call, which stops the event loop."""


@dataclass(frozen=True, slots=True)
class TextBound:
    """Bound by length: at most ``characters`` of a text become one token, spaces not counted if ``skips_spaces``."""

    characters: int
    skips_spaces: bool

    def growing(self, text: str) -> Iterator[int]:
        """Yield the bounds of longer and longer parts of ``text``."""
        if not self.skips_spaces:
            yield -(-len(text) // self.characters)
            return
        count = 0
        for start in range(0, len(text), _SLICE):
            count += sum(map(len, text[start : start + _SLICE].split()))
            yield -(-count // self.characters)

    def least_tokens(self, text: str) -> int:
        return max(self.growing(text), default=0)


def text_bound(tokenizer: Tokenizer) -> TextBound | None:
    """Bound of a tokenizer; None if a token may stand for any number of characters."""
    described = json.loads(tokenizer.to_str())
    joined = _joined(described["normalizer"])
    splits = list(flat_steps(described["pre_tokenizer"], "pretokenizers"))
    names = [step["type"] for step in splits]
    if joined is None or not all(_keeps(step) for step in splits):
        return None
    by_bytes = "ByteLevel" in names or any(
        step["type"] == "ByteLevel" for step in flat_steps(described["normalizer"], "normalizers")
    )
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if not _knows_all(described["model"], vocabulary, by_bytes=by_bytes):
        return None
    added = described["added_tokens"]
    longest = max(map(len, [*vocabulary, *(token["content"] for token in added)]), default=1)
    skips_spaces = not _DROPS_SPACES.isdisjoint(names) or any(token["lstrip"] or token["rstrip"] for token in added)
    return TextBound(longest * joined, skips_spaces)


def _joined(normalizer: Any) -> int | None:
    joined = 1
    for step in flat_steps(normalizer, "normalizers"):
        match step:
            case {"type": "NFC" | "NFKC"}:
                joined *= _COMPOSED
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if content:
                joined *= -(-len(pattern) // len(content))
            case {"type": name} if name not in _KEEPS_LENGTH:
                return None
    return joined


def _keeps(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": name}:
            return name in _KEEPS_ALL or name in _DROPS_SPACES
    return False


def _knows_all(model: Mapping[str, Any], vocabulary: Mapping[str, int], *, by_bytes: bool) -> bool:
    if model["type"] not in ("BPE", "Unigram"):
        return False  # a word that WordPiece or WordLevel doesn't know is one token, however long
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if model["type"] == "Unigram":
        return False  # it joins unknown characters
    if by_bytes:
        return all(letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet())
    return model.get("unk_token") is not None and not model.get("fuse_unk")
