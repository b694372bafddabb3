"""tokenizer.json and tokenizer_config.json of a GGUF file, which names a pipeline and lists tokens and merges.

tokenizer.ggml.model gpt2    bytes as characters, merges; tokenizer.ggml.pre names how a text is split before
tokenizer.ggml.model llama   SentencePiece with byte tokens; the merges follow from the scores
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from decant.runtime.gguf.reader import GgufUnreadable

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type."""

ENDS = frozenset({"<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"})
"""Control tokens that end an answer in any model, as in llama.cpp."""

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_BYTES_OF_WORDS = _BYTES | {"use_regex": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _BYTES]


SPLITS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _split(_QWEN2)),
    "gpt-2": [_BYTES_OF_WORDS],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTES_OF_WORDS],
}
"""Steps before the merges by tokenizer.ggml.pre."""

_WHOLE_WORDS = frozenset({"llama-bpe", "llama-v3", "llama3"})
"""A word that is a token is that token, and prompts begin with the BOS token unless the file says otherwise."""
_COMPOSED = frozenset({"qwen2"})
"""Texts are composed (NFC) first, as the published tokenizer does."""


class GgufTokenizer:
    """The tokenizer of a file's metadata. Raises GgufUnreadable."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._model, self._pre = self._get("model", str, ""), self._get("pre", str, "")
        if self._model not in ("gpt2", "llama"):
            raise GgufUnreadable(f"tokenizer.ggml.model: gpt2 and llama are served, got {self._model!r}")
        if self._model == "gpt2" and self._pre not in SPLITS:
            raise GgufUnreadable(f"tokenizer.ggml.pre: {', '.join(SPLITS)} are served, got {self._pre!r}")
        self._tokens: list[str] = self._list("tokens", str)
        self._types: list[int] = self._list("token_type", int) or [_NORMAL] * len(self._tokens)
        if not self._tokens or len(self._types) != len(self._tokens):
            raise GgufUnreadable(f"tokenizer.ggml has {len(self._tokens)} tokens and {len(self._types)} types of them")
        if len(set(self._tokens)) != len(self._tokens):
            raise GgufUnreadable("tokenizer.ggml.tokens has a token twice")

    def tokenizer_json(self) -> dict[str, Any]:
        is_bytes = self._model == "gpt2"
        vocabulary = self._vocabulary()
        named = self._list("merges", str)
        merges = [_pair(merge) for merge in named] if named else [] if is_bytes else list(self._merges(vocabulary))
        for merge in merges:
            if not (vocabulary.keys() >= {*merge, "".join(merge)}):
                raise GgufUnreadable(f"tokenizer.ggml.merges has {merge}, which are no tokens, or together none")
        model = {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": merges,
            "unk_token": None if is_bytes else self._token("unknown"),
            "fuse_unk": not is_bytes,
            "byte_fallback": not is_bytes,
            "ignore_merges": self._pre in _WHOLE_WORDS,
        }
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            "normalizer": ({"type": "NFC"} if self._pre in _COMPOSED else None) if is_bytes else self._spaces(),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(SPLITS[self._pre])} if is_bytes else None,
            "post_processor": self._post_processor(),
            "decoder": _BYTES_OF_WORDS if is_bytes else self._text_of_spaces(),
            "model": model,
        }

    def tokenizer_config(self) -> dict[str, Any]:
        named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        tokens = {name: self._token(key) for key, name in named.items()}
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self._adds_bos,
            **{name: token for name, token in tokens.items() if token is not None},
        }
        templates = self._templates()
        return config | ({"chat_template": templates} if templates else {})

    def eos_token_ids(self) -> list[int]:
        named = [self._id(name) for name in ("eos", "eot", "eom")]
        texts = (id for id, kind in enumerate(self._types) if kind == _CONTROL and self._tokens[id] in ENDS)
        return list(dict.fromkeys(id for id in (*named, *texts) if id is not None))

    @property
    def _adds_bos(self) -> bool:
        default = self._model == "llama" or self._pre in _WHOLE_WORDS
        return bool(self._get("add_bos_token", bool, default)) and self._id("bos") is not None

    def _get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if value is not default and not isinstance(value, kind):
            raise GgufUnreadable(f"tokenizer.ggml.{name}: {kind.__name__}, got {type(value).__name__}")
        return value

    def _list(self, name: str, kind: type) -> list[Any]:
        values: list[Any] = self._get(name, list, [])
        if not all(isinstance(value, kind) for value in values):
            raise GgufUnreadable(f"tokenizer.ggml.{name}: values of {kind.__name__}")
        return values

    def _id(self, name: str) -> int | None:
        id: int | None = self._get(f"{name}_token_id", int)
        if id is not None and not 0 <= id < len(self._tokens):
            raise GgufUnreadable(f"tokenizer.ggml.{name}_token_id: below {len(self._tokens)}, got {id}")
        return id

    def _token(self, name: str) -> str | None:
        id = self._id(name)
        return None if id is None else self._tokens[id]

    def _vocabulary(self) -> dict[str, int]:
        """All tokens but unused ones, which fill the embedding up. The library gives ids of its own to others."""
        return {token: id for id, token in enumerate(self._tokens) if self._types[id] != _UNUSED}

    def _merges(self, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Pairs that give a token, those of the highest score first; of a token, by the ids of its parts."""
        scores: list[float] = self._list("scores", float)
        if len(scores) != len(self._tokens):
            raise GgufUnreadable(f"tokenizer.ggml has {len(self._tokens)} tokens and {len(scores)} scores")
        found = []
        for token, id in vocabulary.items():
            if self._types[id] != _NORMAL:
                continue
            for at in range(1, len(token)):
                left, right = token[:at], token[at:]
                if left in vocabulary and right in vocabulary:
                    found.append((-scores[id], id, vocabulary[left], vocabulary[right], (left, right)))
        return (pair for *_, pair in sorted(found))

    def _added(self) -> list[dict[str, Any]]:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": id, "content": self._tokens[id], **flags, "special": kind != _USER_DEFINED}
            for id, kind in enumerate(self._types)
            if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and self._model == "llama")
        ]

    @property
    def _has_prefix(self) -> bool:
        return bool(self._get("add_space_prefix", bool, True))

    def _spaces(self) -> dict[str, Any]:
        prepend = [{"type": "Prepend", "prepend": "▁"}] if self._has_prefix else []
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        return {"type": "Sequence", "normalizers": [*prepend, replace]}

    def _text_of_spaces(self) -> dict[str, Any]:
        replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if self._has_prefix else []
        return {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}

    def _post_processor(self) -> dict[str, Any] | None:
        """The tokens before and after a prompt."""
        adds_eos = bool(self._get("add_eos_token", bool, False)) and self._id("eos") is not None
        before = ["bos"] if self._adds_bos else []
        after = ["eos"] if adds_eos else []
        if not before and not after:
            return None

        def tokens(names: Sequence[str], type_id: int) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": self._token(name), "type_id": type_id}} for name in names]

        def around(part: str, type_id: int) -> list[dict[str, Any]]:
            text = {"Sequence": {"id": part, "type_id": type_id}}
            return [*tokens(before, type_id), text, *tokens(after, type_id)]

        used = {self._token(name): self._id(name) for name in (*before, *after)}
        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": [*around("A", 0), *around("B", 1)],
            "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]} for token, id in used.items()},
        }

    def _templates(self) -> str | list[dict[str, str]] | None:
        main, prefix = "tokenizer.chat_template", "tokenizer.chat_template."
        others = {key.removeprefix(prefix): text for key, text in self._metadata.items() if key.startswith(prefix)}
        named = {**({"default": self._metadata[main]} if main in self._metadata else {}), **others}
        if not all(isinstance(text, str) for text in named.values()):
            raise GgufUnreadable("tokenizer.chat_template is no text")
        if named.keys() <= {"default"}:
            return named.get("default")
        return [{"name": name, "template": text} for name, text in named.items()]


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or not left or not right or " " in right:
        raise GgufUnreadable(f"tokenizer.ggml.merges has {merge!r}: two tokens with a space between")
    return left, right
