"""Tokenizer of a model, from tokenizer.json, with the tokens that tokenizer_config.json adds.

Whether a prompt begins with the BOS token:

    tokenizer.json                   classes with the step              begins with it
    has a post-processor             any                                if that adds it, or with `--add-bos`
    has none                         CodeLlama's, Gemma's               unless ``add_bos_token`` is false
    has none                         any other                          only with `--add-bos`

So it is in transformers 5.23 but for Gemma's, of which 4.57 adds the token. 4.57 added it for more classes and by
``add_bos_token``: `contradictions` says where that differs from what the tokenizer does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from decant.runtime.model_files import ModelFiles, ModelUnreadable
from decant.runtime.tokenizer_files import AddedTokenEntry, added_tokens, token_text

_BOS_WITHOUT_PROCESSOR = frozenset({"CodeLlamaTokenizer", "GemmaTokenizer"})
_BOS_BY_DEFAULT = _BOS_WITHOUT_PROCESSOR | {"LlamaTokenizer", "CohereTokenizer"}
"""Tokenizer classes of transformers 4.57 whose ``add_bos_token`` is true unless it is set."""
_PROBE = "a"


def load_tokenizer(files: ModelFiles, config: Mapping[str, Any], *, add_bos: bool = False) -> Tokenizer:
    """Load a tokenizer; with ``add_bos`` its prompts begin with the BOS token. Raises ModelUnreadable."""
    path = files.folder / "tokenizer.json"
    if not path.is_file():
        raise ModelUnreadable(files.id, "it has no tokenizer.json: save it with a fast tokenizer of transformers")
    tokenizer = _from_file(files.id, path)
    # The file may keep settings of the last training; a prompt is neither truncated nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([_added_token(entry) for entry in added_tokens(config, present)])
    _begin_with_bos(files, tokenizer, config, add_bos=add_bos)
    return tokenizer


def _from_file(model: str, path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise ModelUnreadable(model, f"tokenizer.json can't be read: {error}") from None


def _added_token(entry: AddedTokenEntry) -> AddedToken:
    return AddedToken(entry.content, special=entry.special, **entry.flags)


def _begin_with_bos(files: ModelFiles, tokenizer: Tokenizer, config: Mapping[str, Any], *, add_bos: bool) -> None:
    bos = _named_id(tokenizer, config, "bos_token")
    if tokenizer.post_processor is None and _kind(config) in _BOS_WITHOUT_PROCESSOR:
        add_bos = add_bos or bool(_promised_bos(config))
    if not add_bos:
        return
    if bos is None:
        reason = "--add-bos: its tokenizer_config.json names no bos_token that the tokenizer has"
        raise ModelUnreadable(files.id, reason)
    if not _adds(tokenizer, bos, 0):
        _put_first(tokenizer, bos)


def _kind(config: Mapping[str, Any]) -> str:
    return str(config.get("tokenizer_class")).removesuffix("Fast")


def _promised_bos(config: Mapping[str, Any]) -> bool | None:
    promised: bool | None = config.get("add_bos_token", True if _kind(config) in _BOS_BY_DEFAULT else None)
    return promised


def _put_first(tokenizer: Tokenizer, id: int) -> None:
    token = str(tokenizer.id_to_token(id))
    step = processors.TemplateProcessing(single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, id)])
    before = tokenizer.post_processor
    tokenizer.post_processor = step if before is None else processors.Sequence([before, step])


def contradictions(files: ModelFiles, tokenizer: Tokenizer, config: Mapping[str, Any]) -> Iterator[str]:
    """Where ``add_bos_token`` and ``add_eos_token`` say other than the tokenizer does."""
    promises = (
        ("add_bos_token", _promised_bos(config), "bos_token", 0),
        ("add_eos_token", config.get("add_eos_token"), "eos_token", -1),
    )
    for name, promise, token, place in promises:
        is_added = _adds(tokenizer, _named_id(tokenizer, config, token), place)
        if promise is None or bool(promise) == is_added:
            continue
        effect = "have that token" if is_added else "do not have it"
        advice = f"; --add-bos {files.id} adds it" if promise and name == "add_bos_token" else ""
        said = str(bool(promise)).lower()
        yield f"{name} is {said}, and by the post-processor of tokenizer.json prompts {effect}{advice}"


def _named_id(tokenizer: Tokenizer, config: Mapping[str, Any], name: str) -> int | None:
    described = config.get(name)
    id: int | None = tokenizer.token_to_id(token_text(described)) if described else None
    return id


def _adds(tokenizer: Tokenizer, id: int | None, place: int) -> bool:
    """Whether the post-processor adds a token at the first or last place of a prompt."""
    whole, plain = (tokenizer.encode(_PROBE, add_special_tokens=special).ids for special in (True, False))
    return id is not None and whole != plain and whole[place] == id and plain[place:][:1] != [id]
