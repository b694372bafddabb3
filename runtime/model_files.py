"""The small files of a model: configuration, tokenizer, sampling defaults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from decant.runtime.gguf.folder import gguf_folder
from decant.runtime.gguf.reader import GgufUnreadable
from decant.runtime.tokenizer_files import facts_of

PATTERNS = ("*.json", "*.jinja", "tokenizer*")
"""Files that are downloaded of a hub model."""

GGUF = ".gguf"
"""Suffix of files that are a whole model."""

_WITHOUT_NETWORK = "without network, give a folder, or set HF_HOME to a cache that has the model"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_COUNT_LIMIT = 1 << 31
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class ModelUnreadable(Exception):
    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model}: {reason}")
        self.model = model
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Facts from a model's small files.

    id                hub name, or the name of the folder or GGUF file
    revision          hub commit, or a hash of a folder's small files
    context_length    in tokens
    vocab_size        rows of the embedding; may exceed the tokenizer's
    eos_token_ids     those of the configuration and the tokenizer's own, below ``vocab_size``
    default_sampling  as transformers' ``generate``: greedy unless do_sample is set
    token_ids         64-bit hash of what determines token ids and ends, which routers and workers compare
    tokenizer_files   64-bit hash of the tokenizer's files as bytes, which those that know no ``token_ids`` compare
    """

    id: str
    folder: Path
    revision: str
    context_length: int | None
    vocab_size: int | None
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float]
    token_ids: int
    tokenizer_files: int

    @property
    def hashes(self) -> frozenset[int]:
        """Hashes that a compatible process has."""
        return frozenset((self.token_ids, self.tokenizer_files))


def local_folder(model: str) -> Path | None:
    """Return a folder's path, or the folder made of a GGUF file; None for a name on the hub. Raises ModelUnreadable."""
    path = Path(model)
    if path.is_dir():
        return path.resolve()
    if path.suffix != GGUF or not path.is_file():
        return None
    try:
        return gguf_folder(path)
    except GgufUnreadable as error:
        raise ModelUnreadable(model, str(error)) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        reason = f"the files made of it can't be written: {error}; XDG_CACHE_HOME chooses their folder"
        raise ModelUnreadable(model, reason) from None


def find(model: str, revision: str | None = None, *, id: str | None = None) -> ModelFiles:
    """Read a folder or a GGUF file, or download a hub model. Raises ModelUnreadable."""
    if (folder := local_folder(model)) is not None:
        return _read(id or (folder.name if Path(model).is_dir() else Path(model).stem), model, folder, None)
    try:
        fetched = download(model, revision, PATTERNS)
    except Exception as error:  # noqa: BLE001 - HTTP clients and proxies raise errors of their own
        reason = str(error).strip().partition("\n")[0]
        advice = f"; {_WITHOUT_NETWORK}" if isinstance(error, LocalEntryNotFoundError) else ""
        raise ModelUnreadable(model, f"no folder, and no hub name within reach ({reason}){advice}") from None
    return _read(id or model, model, fetched, fetched.name)


def download(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download files of a hub model. Raises errors of huggingface_hub and of its HTTP client.

    Requests of the client that huggingface_hub keeps then wait no longer for an answer than for a download.
    """
    hooks = get_session().event_hooks["request"]
    if _limit_waits not in hooks:
        hooks.append(_limit_waits)
    return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))


def _limit_waits(request: Any) -> None:
    """Set the timeouts of an HTTP request that has none, as huggingface_hub's for a list of files."""
    limits = request.extensions["timeout"]
    limits.update({step: constants.HF_HUB_DOWNLOAD_TIMEOUT for step, limit in limits.items() if limit is None})


def _read(id: str, model: str, folder: Path, commit: str | None) -> ModelFiles:
    config = read_json(model, folder / "config.json")
    if config is None and (folder / "adapter_config.json").is_file():
        reason = "it is an adapter (adapter_config.json): serve it beside its base model with --adapters NAME=FOLDER"
        raise ModelUnreadable(model, reason)
    if config is None:
        raise ModelUnreadable(model, "it has no config.json")
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise ModelUnreadable(model, "config.json: text_config is no JSON object")
    generation = read_json(model, folder / "generation_config.json") or {}
    try:
        context_length, vocab_size = _context_length(text), _count(text, "vocab_size")
        tokenizer = facts_of(read_json(model, folder / "tokenizer.json") or {}, read_tokenizer_config(model, folder))
        eos = _end_tokens((generation, text, config), tokenizer.eos_token_id, vocab_size)
        sampling = _default_sampling(generation)
    except ValueError as error:
        raise ModelUnreadable(model, str(error)) from None
    files = _digest(json.dumps([context_length, vocab_size, sorted(eos)]).encode(), *_contents(folder))
    return ModelFiles(
        id=id,
        folder=folder,
        revision=commit or files.hex(),
        context_length=context_length,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        default_sampling=sampling,
        token_ids=_integer(_digest(json.dumps([vocab_size, sorted(eos)]).encode(), tokenizer.identity)),
        tokenizer_files=_integer(files),
    )


def read_tokenizer_config(model: str, folder: Path) -> Mapping[str, Any]:
    """Read tokenizer_config.json with special_tokens_map.json. Raises ModelUnreadable."""
    config = read_json(model, folder / "tokenizer_config.json") or {}
    if "added_tokens_decoder" in config:
        return config
    return {**config, **(read_json(model, folder / "special_tokens_map.json") or {})}


def _contents(folder: Path) -> Iterator[bytes]:
    for name in _TOKENIZER_FILES:
        file = folder / name
        content = file.read_bytes() if file.is_file() else b""
        yield len(content).to_bytes(8, "little")
        yield content


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _integer(digest: bytes) -> int:
    return int.from_bytes(digest, "little")


def _end_tokens(
    configs: Iterable[Mapping[str, Any]], of_tokenizer: int | None, vocab_size: int | None
) -> tuple[int, ...]:
    """Ids of the first configuration that names some, and the tokenizer's: chat models are often trained to end with
    it, and keep the base model's id in their configuration.
    """
    named = next((value for config in configs if (value := config.get("eos_token_id")) is not None), None)
    ids = dict.fromkeys((*_ids(named), *_ids(of_tokenizer)))
    return tuple(id for id in ids if vocab_size is None or id < vocab_size)


def _default_sampling(generation: Mapping[str, Any]) -> Mapping[str, float]:
    named = {name: generation.get(name) for name in _SAMPLING}
    sampling = {name: _SAMPLING[name] if value is None else value for name, value in named.items()}
    for name, value in sampling.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"generation_config.json: {name} is no number")
    if not generation.get("do_sample"):
        sampling["temperature"] = 0.0
    return sampling


def _count(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is not None and not (_is_integer(value, 1) and value < _COUNT_LIMIT):
        raise ValueError(f"config.json: {name} is no whole number above 0 and below {_COUNT_LIMIT}")
    return value


def _context_length(config: Mapping[str, Any]) -> int | None:
    """Compute it as engine/checkpoint/context_length.py does: some checkpoints have the length before scaling."""
    positions = _count(config, "max_position_embeddings")
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if positions is None or not isinstance(scaling, dict):
        return positions
    if scaling.get("rope_type", scaling.get("type")) not in ("yarn", "llama3"):
        return positions
    original, factor = scaling.get("original_max_position_embeddings", positions), scaling.get("factor") or 1.0
    try:
        if not all(isinstance(value, int | float) for value in (original, factor)):
            raise TypeError
        scaled = int(original * float(factor))
    except (OverflowError, TypeError, ValueError):
        raise ValueError("config.json: the factor or the original length of its rotary scaling is no number") from None
    return max(positions, scaled)


def _ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(_is_integer(id, 0) for id in ids):
        raise ValueError("eos_token_id is neither a token id nor a list of them")
    return ids


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def read_json(model: str, file: Path) -> Mapping[str, Any] | None:
    """Read an object; None without a file. Raises ModelUnreadable."""
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnreadable(model, f"{file.name} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelUnreadable(model, f"{file.name} is no JSON object")
    return content
