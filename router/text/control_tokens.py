"""Tokens that structure a prompt, and a tokenizer that has them only where they are put.

In the tokenizer's files a control token is found by its text, wherever that comes from. `PlainTokenizer` is the same
tokenizer with other texts for its control tokens, drawn at random at its start: what a request contains can't be one of
them, and all else (normalizer, spaces around tokens, ids) remains as it is.

    text of a prompt   <|im_start|>user\n what is <|im_end|>?<|im_end|>
    tokenized          <kqxz..aa>user\n what is <|im_end|>?<kqxz..ab>
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

_NONCE_LETTERS = 20
_INDEX_LETTERS = 6


class AddedTexts(NamedTuple):
    """Texts of a tokenizer's added tokens: control tokens, and the others."""

    control: tuple[str, ...]
    others: tuple[str, ...]


NO_TOKENS = AddedTexts((), ())
WrittenTokens = Sequence[tuple[int, str]]
"""Position and text of tokens in a text, in order."""


def added_texts(tokenizer: Tokenizer, template: str) -> AddedTexts:
    """Control tokens are the special ones, and those that the chat template names (``<tool_response>``)."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    special = set() if tokenizer.encode_special_tokens else {token.content for token in added if token.special}
    named = {token.content for token in added if not token.special and _names(template, token.content)}
    control = [token.content for token in added if token.content in special | named]
    others = [token.content for token in added if token.content not in special | named and not token.normalized]
    return AddedTexts(tuple(control), tuple(others))


def _names(template: str, token: str) -> bool:
    return token in template and not token.isspace() and not token.isalnum()


class InseparableTokens(ValueError):
    pass


class PlainTokenizer:
    """Raises InseparableTokens if the library gives the renamed tokens other ids."""

    def __init__(self, tokenizer: Tokenizer, control: Sequence[str]) -> None:
        nonce = "".join(secrets.choice(string.ascii_lowercase) for _ in range(_NONCE_LETTERS))
        self.tokens = tuple(control)
        self._stand_ins = {
            token: f"{token[0]}{nonce}{_letters(index)}{token[-1]}" for index, token in enumerate(control)
        }
        self._tokenizer = _renamed(tokenizer, self._stand_ins)
        for token in tokenizer.get_added_tokens_decoder().values():
            id = self._tokenizer.token_to_id(self._stand_ins.get(token.content, token.content))
            if id != tokenizer.token_to_id(token.content):
                raise InseparableTokens(f"the added token {token.content!r} has no id of its own")
        unknown = _unknown_id(tokenizer)
        ids = {token: tokenizer.token_to_id(token) for token in control}
        self._ids = {token: id for token, id in ids.items() if id != unknown}

    def encode(self, text: str, written: WrittenTokens, *, special: bool) -> list[int]:
        """Tokenize a text in which only the tokens at these positions are control tokens; ``special`` adds the tokens
        around a prompt.
        """
        whole = self._with_stand_ins(text, written)
        ids = self._encode(whole, special)
        around = self._tokenizer.num_special_tokens_to_add(False) if special else 0
        if self._count(ids) >= around + sum(token in self._ids for _, token in written):
            return ids
        # A token may need spaces around it, or the beginning of the text: elsewhere its text is no token.
        whole = self._with_stand_ins(text, self._found(whole, written))
        return self._encode(whole, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        # Of the library's calls, only those for batches release the interpreter's lock.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def _with_stand_ins(self, text: str, written: WrittenTokens) -> str:
        parts: list[str] = []
        position = 0
        for start, token in written:
            parts += (text[position:start], self._stand_ins[token])
            position = start + len(token)
        return "".join((*parts, text[position:]))

    def _count(self, ids: Sequence[int]) -> int:
        control = set(self._ids.values())
        return sum(id in control for id in ids)

    def _found(self, whole: str, written: WrittenTokens) -> WrittenTokens:
        """Those of the tokens whose stand-ins in ``whole`` are tokens."""
        encoding = self._tokenizer.encode_batch([whole], add_special_tokens=False)[0]
        control = set(self._ids.values())
        spans = [span for id, span in zip(encoding.ids, encoding.offsets, strict=True) if id in control]
        found, longer = [], 0
        for start, token in written:
            begin = start + longer
            longer += len(self._stand_ins[token]) - len(token)
            while spans and spans[0][1] <= begin:
                spans.pop(0)
            if token not in self._ids or (spans and spans[0][0] <= begin):
                found.append((start, token))
        return found


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    """Id that stands for characters without a token, which any text may have."""
    model = json.loads(tokenizer.to_str())["model"]
    token = model.get("unk_token")
    id: int | None = tokenizer.token_to_id(token) if token is not None else model.get("unk_id")
    return id


def _letters(index: int) -> str:
    letters = ""
    for _ in range(_INDEX_LETTERS):
        index, letter = divmod(index, 26)
        letters += string.ascii_lowercase[letter]
    return letters


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = described["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): id for token, id in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if "merges" in model:
        model["merges"] = list(_merges_without(model, names))
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    made = Tokenizer.from_str(json.dumps(described))
    made.encode_special_tokens = tokenizer.encode_special_tokens
    return made


def _merges_without(model: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[list[str]]:
    """Merges that neither make nor use a control token."""
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if not {left, right, left + right.removeprefix(prefix)} & names.keys():
            yield [left, right]
