"""Models of this router: tokenizer, chat template and limits.

Tokenizing equals that of transformers, except for classes that build another pipeline than tokenizer.json
(LlamaTokenizer, for older files).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Tokenizer

from decant.protos import inference_pb2 as pb
from decant.router.limits import check_sampling
from decant.router.text.chat_template import ChatTemplate
from decant.router.text.detokenizer import TokenTable, UnsupportedDecoder, make_token_table
from decant.router.text.text_work import TextWork
from decant.router.text.token_bounds import TextBound, text_bound
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument, NotFound, PermissionDenied
from decant.runtime.model_files import ModelFiles, ModelUnreadable, find, read_json

MAX_INLINE_LENGTH = 2048
"""What the event loop converts, in about a millisecond; threads convert more."""
NO_DEADLINE = Deadline()

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE_SPECIAL = ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model to serve; ``default_sampling`` has every field but the seed and the logit bias."""

    id: str
    revision: str
    max_context_length: int | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    default_sampling: pb.SamplingParams
    chat: ChatTemplate | None
    tokenizer_hash: int
    tokenizer: Tokenizer = field(repr=False)
    texts: TextWork = field(default_factory=TextWork, repr=False)
    token_table: TokenTable = field(init=False, repr=False)
    bound: TextBound | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_table", make_token_table(self.tokenizer))
        object.__setattr__(self, "bound", text_bound(self.tokenizer))

    @property
    def has_chat_template(self) -> bool:
        return self.chat is not None

    async def encode(self, text: str, *, special: bool = True, deadline: Deadline = NO_DEADLINE) -> list[int]:
        if len(text) <= MAX_INLINE_LENGTH:
            return self._encode(text, special)
        return await self.texts.run(len(text), deadline, self._encode, text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        # Of the library's calls, only those for batches release the interpreter's lock.
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    async def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, deadline: Deadline = NO_DEADLINE
    ) -> str:
        """Detokenize ``ids``, skipping ids without a token. Raises QueueFull, DeadlineExceeded."""
        if len(ids) <= MAX_INLINE_LENGTH:
            return self._decode(ids, skip_special_tokens)
        return await self.texts.run(4 * len(ids), deadline, self._decode, ids, skip_special_tokens)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return text

    async def least_tokens(self, text: str, enough: int) -> int:
        least = 0
        for least in () if self.bound is None else self.bound.growing(text):
            if least >= enough:
                break
            await asyncio.sleep(0)
        return least


class Models:
    """The first model is the default; those `withheld` are served to other tenants."""

    def __init__(self, models: Iterable[ServedModel], withheld: Collection[str] = ()) -> None:
        listed = list(models)
        self._withheld = frozenset(withheld)
        self.default = listed[0]
        self.by_id: Mapping[str, ServedModel] = MappingProxyType({model.id: model for model in listed})
        if len(self.by_id) < len(listed):
            raise ValueError(f"models: each id once, got {', '.join(model.id for model in listed)}")

    def find(self, name: str) -> ServedModel:
        """Find a model by name, the default if empty. Raises NotFound, PermissionDenied."""
        if not name:
            return self.default
        if name in self._withheld:
            raise PermissionDenied(f"model {name}")
        try:
            return self.by_id[name]
        except KeyError:
            raise NotFound("model", name) from None

    def subset(self, ids: Collection[str]) -> Models:
        models = [model for id, model in self.by_id.items() if id in ids]
        return Models(models, self.by_id.keys() - set(ids))


def load(sources: Iterable[str]) -> Models:
    """Load models given as SOURCE or ID=SOURCE, downloading a hub's files. Raises ModelUnreadable."""
    models: dict[str, ServedModel] = {}
    texts = TextWork()
    for source in sources:
        id, location = _split_source(source)
        model = served(find(location, id=id), texts)
        if model.id in models:
            raise ModelUnreadable(
                source, f"another model is called {model.id} already; give it a name: NAME={location}"
            )
        models[model.id] = model
    return Models(models.values())


def _split_source(source: str) -> tuple[str | None, str]:
    id, equals, location = source.partition("=")
    if not equals or Path(source).is_dir():
        return None, source
    return id or None, location


def served(files: ModelFiles, texts: TextWork | None = None) -> ServedModel:
    """Load tokenizer and chat template of a model. Raises ModelUnreadable."""
    config = _config(files)
    tokenizer = _tokenizer(files, config)
    sampling = _default_sampling(files)
    try:
        return ServedModel(
            id=files.id,
            revision=files.revision,
            max_context_length=files.context_length,
            vocab_size=files.vocab_size or tokenizer.get_vocab_size(),
            eos_token_ids=frozenset(files.eos_token_ids),
            default_sampling=sampling,
            chat=_chat(files, config),
            tokenizer_hash=files.tokenizer,
            tokenizer=tokenizer,
            texts=texts or TextWork(),
        )
    except UnsupportedDecoder as error:
        raise ModelUnreadable(files.id, f"tokenizer.json: {error}") from None


def _chat(files: ModelFiles, config: Mapping[str, Any]) -> ChatTemplate | None:
    file = files.folder / "chat_template.jinja"
    template = config.get("chat_template")
    if file.is_file():
        try:
            template = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelUnreadable(files.id, f"chat_template.jinja can't be read: {error}") from None
    if isinstance(template, list):
        template = {named["name"]: named["template"] for named in template}
    if isinstance(template, dict):
        template = template.get("default")
    return ChatTemplate(template, dict(_named_tokens(config))) if template else None


def _named_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    more = config.get("extra_special_tokens")
    named = {name: config[name] for name in _SPECIAL if config.get(name)} | (more if isinstance(more, dict) else {})
    for name, token in named.items():
        yield name, token if isinstance(token, str) else token["content"]


def _default_sampling(files: ModelFiles) -> pb.SamplingParams:
    sampling = pb.SamplingParams(frequency_penalty=0.0, presence_penalty=0.0, n=1)
    for name, value in files.default_sampling.items():
        setattr(sampling, name, int(value) if name == "top_k" else value)
    try:
        check_sampling(sampling)
    except InvalidArgument as error:
        raise ModelUnreadable(files.id, f"generation_config.json: {error}") from None
    return sampling


def _config(files: ModelFiles) -> Mapping[str, Any]:
    config = _read(files, "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else {**config, **_read(files, "special_tokens_map.json")}


def _read(files: ModelFiles, name: str) -> Mapping[str, Any]:
    return read_json(files.id, files.folder / name) or {}


def _tokenizer(files: ModelFiles, config: Mapping[str, Any]) -> Tokenizer:
    path = files.folder / "tokenizer.json"
    if not path.is_file():
        raise ModelUnreadable(files.id, "it has no tokenizer.json: save it with a fast tokenizer of transformers")
    tokenizer = _from_file(files.id, path)
    # The file may keep settings of the last training; a prompt is neither truncated nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([token for token in _added(config) if token.content not in present])
    return tokenizer


def _from_file(model: str, path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise ModelUnreadable(model, f"tokenizer.json can't be read: {error}") from None


def _added(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Tokens to add, in the order of transformers, which decides their ids."""
    listed: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        yield _token(token)
    for name in _SPECIAL:
        if config.get(name):
            yield _token(config[name])
    for name in _MORE_SPECIAL:
        more = config.get(name) or ()
        for token in more.values() if isinstance(more, dict) else more:
            yield _token(token)


def _token(described: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(described, str):
        return AddedToken(described, special=True, normalized=False)
    flags = {
        name: bool(described[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in described
    }
    return AddedToken(described["content"], special=bool(described.get("special", True)), **flags)
