"""A model's tokenizer as its files describe it: end token, added tokens, identity of its token ids.

No tokenizer library: workers read these files as routers do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED_TOKENS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")

_ENCODING = ("normalizer", "pre_tokenizer", "post_processor", "added_tokens")
"""Parts of tokenizer.json besides its model that determine token ids: neither decoder nor truncation nor padding."""


@dataclass(frozen=True, slots=True)
class AddedTokenEntry:
    """A token beside the tokenizer's model; ``flags`` are those that differ from the library's defaults."""

    content: str
    special: bool
    flags: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What router and worker need of a tokenizer; ``identity`` is equal if all texts give equal token ids."""

    eos_token_id: int | None
    identity: bytes


def facts_of(described: Mapping[str, Any], config: Mapping[str, Any]) -> TokenizerFacts:
    """Facts of tokenizer.json, empty without one, and of a configuration. Raises ValueError for malformed ones."""
    try:
        return TokenizerFacts(_eos_token_id(described, config), _identity(described, config))
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        raise ValueError(f"tokenizer.json or tokenizer_config.json is malformed: {error!r}") from None


def token_text(described: str | Mapping[str, Any]) -> str:
    return described if isinstance(described, str) else str(described["content"])


def added_tokens(config: Mapping[str, Any], present: Iterable[str]) -> Iterator[AddedTokenEntry]:
    """Tokens that the configuration adds to those ``present``, in transformers' order, which decides their ids."""
    known = frozenset(present)
    for described in _listed(config):
        entry = _entry(described)
        if entry.content not in known:
            yield entry


def _listed(config: Mapping[str, Any]) -> Iterator[str | Mapping[str, Any]]:
    listed: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        yield token
    for name in NAMED_TOKENS:
        if config.get(name):
            yield config[name]
    for name in _LISTED_TOKENS:
        more = config.get(name) or ()
        yield from more.values() if isinstance(more, dict) else more


def _entry(described: str | Mapping[str, Any]) -> AddedTokenEntry:
    if isinstance(described, str):
        return AddedTokenEntry(described, True, {"normalized": False})
    flags = {name: bool(described[name]) for name in _FLAGS if name in described}
    return AddedTokenEntry(described["content"], bool(described.get("special", True)), flags)


def _eos_token_id(described: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Id of the ``eos_token`` in tokenizer.json, else in the configuration's table."""
    if not config.get("eos_token"):
        return None
    text = token_text(config["eos_token"])
    for entry in described.get("added_tokens") or ():
        if entry["content"] == text:
            return int(entry["id"])
    vocabulary = (described.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict) and text in vocabulary:
        return int(vocabulary[text])
    if isinstance(vocabulary, list):
        for id, (piece, _) in enumerate(vocabulary):
            if piece == text:
                return id
    listed: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    return next((int(id) for id, entry in listed.items() if token_text(entry) == text), None)


def _identity(described: Mapping[str, Any], config: Mapping[str, Any]) -> bytes:
    present = [entry["content"] for entry in described.get("added_tokens") or ()]
    digest = hashlib.blake2b(digest_size=16)
    for part in (
        {name: described.get(name) for name in _ENCODING},
        _model(described.get("model") or {}),
        [asdict(entry) for entry in added_tokens(config, present)],
        bool(config.get("split_special_tokens", False)),
    ):
        content = json.dumps(part, sort_keys=True).encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def _model(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model with its merges in the newer form, a pair each: the older form joins them by a space."""
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in described.get("merges") or ()]
    return {**described, "merges": merges}
