"""Models of this router: tokenizer, chat template and limits.

Tokenizing is tokenizer.json's, as in transformers, except for classes of 5.23 that build another pipeline than the
file's (Llama's for older files, Gemma's); 4.57 uses the file's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from decant.protos import inference_pb2 as pb
from decant.router.limits import check_sampling
from decant.router.text.answer_grammar import LarkTerms
from decant.router.text.chat_template import ChatTemplate
from decant.router.text.control_tokens import InseparableTokens, PlainTokenizer, WrittenTokens, added_texts
from decant.router.text.detokenizing.make import make_token_table
from decant.router.text.detokenizing.token_table import PromptEnd, TokenTable, UnsupportedDecoder
from decant.router.text.guide_check import GuideCheck
from decant.router.text.load_tokenizer import contradictions, load_tokenizer
from decant.router.text.reasoning.formats import Reasoning, reasoning_of
from decant.router.text.template_files import DEFAULT, FOR_TOOLS, read_templates
from decant.router.text.text_work import TextWork
from decant.router.text.token_bounds import TextBound, text_bound
from decant.router.text.tools.call_format import CallFormat
from decant.router.text.tools.formats import format_of
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument, NotFound, PermissionDenied
from decant.runtime.model_files import ModelFiles, ModelUnreadable, find, read_tokenizer_config
from decant.runtime.settings import SettingError
from decant.runtime.telemetry import logs
from decant.runtime.tokenizer_files import NAMED_TOKENS, token_text

MAX_INLINE_LENGTH = 2048
"""What the event loop converts, in about a millisecond; threads convert more."""
NO_DEADLINE = Deadline()

_log = logs.get(__name__)


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
    hashes: frozenset[int]
    """Of the tokenizer: those that a compatible worker has."""
    tokenizer: Tokenizer = field(repr=False)
    folder: Path
    """Of the tokenizer's files."""
    plain_tokenizer: PlainTokenizer = field(repr=False)
    tool_chat: ChatTemplate | None = None
    """The template of conversations with tools, if the model has one for these."""
    call_format: CallFormat | None = None
    """Format of calls that the template declares."""
    reasoning: Reasoning | None = None
    """Markers of reasoning that the template declares."""
    other_templates: tuple[str, ...] = ()
    """Names of the chat templates beside the default."""
    contradictions: tuple[str, ...] = ()
    """Of the tokenizer's files, for the log."""
    texts: TextWork = field(default_factory=TextWork, repr=False)
    guides: GuideCheck | None = field(default=None, repr=False)
    """None: no output is guided."""
    token_table: TokenTable = field(init=False, repr=False)
    bound: TextBound | None = field(init=False, repr=False)
    terms: LarkTerms = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_table", make_token_table(self.tokenizer))
        object.__setattr__(self, "bound", text_bound(self.tokenizer))
        object.__setattr__(self, "terms", LarkTerms(self.tokenizer, self.eos_token_ids))

    @property
    def has_chat_template(self) -> bool:
        return self.chat is not None

    async def encode(
        self,
        text: str,
        *,
        special: bool = True,
        written: WrittenTokens | None = None,
        deadline: Deadline = NO_DEADLINE,
    ) -> list[int]:
        """Tokenize a text, with the model's tokens around a prompt if ``special``. Control tokens in it are those that
        are ``written``; None: all whose text it contains. Raises QueueFull, DeadlineExceeded.
        """
        if len(text) <= MAX_INLINE_LENGTH:
            return self._encode(text, special, written)
        return await self.texts.run(len(text), deadline, self._encode, text, special, written)

    def _encode(self, text: str, special: bool, written: WrittenTokens | None = None) -> list[int]:
        if written is not None:
            return self.plain_tokenizer.encode(text, written, special=special)
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
        return self.token_table.decode(ids, skip_special_tokens=skip_special_tokens)

    async def text_before(
        self, ids: Sequence[int], end: PromptEnd, *, skip_special_tokens: bool, deadline: Deadline = NO_DEADLINE
    ) -> str:
        """Text of a prompt without its unfinished character, with which the output's text begins."""
        if not end.rest:
            return await self.decode(ids, skip_special_tokens=skip_special_tokens, deadline=deadline)
        ids = self.token_table.without_rest(ids, end)
        text = await self.decode(ids, skip_special_tokens=skip_special_tokens, deadline=deadline)
        return text.removesuffix("\ufffd")

    def least_tokens_at_once(self, text: str) -> int:
        """Lower bound of a text's tokens from its length, or from its first characters where spaces don't count."""
        return 0 if self.bound is None else next(iter(self.bound.growing(text)), 0)

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

    def knows(self, name: str) -> bool:
        """Whether a model has that id, served to this tenant or withheld."""
        return name in self.by_id or name in self._withheld

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


def load(sources: Iterable[str], add_bos: Collection[str] = ()) -> Models:
    """Load models given as SOURCE or ID=SOURCE, downloading a hub's files; prompts of those in ``add_bos``, by id,
    begin with the BOS token. Raises ModelUnreadable; SettingError for an id without a model.
    """
    models: dict[str, ServedModel] = {}
    texts = TextWork()
    for source in sources:
        id, location = _split_source(source)
        files = find(location, id=id)
        model = served(files, texts, add_bos=files.id in add_bos)
        if model.id in models:
            raise ModelUnreadable(
                source, f"another model is called {model.id} already; give it a name: NAME={location}"
            )
        for template in (model.chat, model.tool_chat):
            if template is not None and (failure := template.start()) is not None:
                raise ModelUnreadable(source, f"its chat template can't be used: {failure}")
        models[model.id] = model
        for reason in model.contradictions:
            _log.warning("the tokenizer's files contradict each other", model=model.id, reason=reason)
    if unknown := sorted(set(add_bos) - models.keys()):
        raise SettingError("add_bos", f"ids of models that this router serves ({', '.join(models)})", unknown[0])
    return Models(models.values())


def _split_source(source: str) -> tuple[str | None, str]:
    id, equals, location = source.partition("=")
    if not equals or Path(source).exists():
        return None, source
    return id or None, location


def served(files: ModelFiles, texts: TextWork | None = None, *, add_bos: bool = False) -> ServedModel:
    """Load tokenizer and chat template of a model. Raises ModelUnreadable."""
    config = read_tokenizer_config(files.id, files.folder)
    tokenizer = load_tokenizer(files, config, add_bos=add_bos)
    templates = dict(read_templates(files, config))
    default, for_tools = templates.pop(DEFAULT, None), templates.get(FOR_TOOLS)
    added = added_texts(tokenizer, (default or "") + (for_tools or ""))
    variables = dict(_named_tokens(config))
    sampling = _default_sampling(files)
    vocab_size = files.vocab_size or tokenizer.get_vocab_size()
    try:
        return ServedModel(
            id=files.id,
            revision=files.revision,
            max_context_length=files.context_length,
            vocab_size=vocab_size,
            eos_token_ids=frozenset(files.eos_token_ids),
            default_sampling=sampling,
            chat=ChatTemplate(default, variables, added) if default else None,
            tool_chat=ChatTemplate(for_tools, variables, added) if for_tools else None,
            call_format=format_of(for_tools or default or ""),
            reasoning=reasoning_of(default or "", tokenizer),
            other_templates=tuple(templates),
            contradictions=tuple(contradictions(files, tokenizer, config)),
            hashes=files.hashes,
            tokenizer=tokenizer,
            folder=files.folder,
            plain_tokenizer=PlainTokenizer(tokenizer, added.control),
            texts=texts or TextWork(),
            guides=GuideCheck(files.folder / "tokenizer.json", vocab_size, files.eos_token_ids),
        )
    except (UnsupportedDecoder, InseparableTokens) as error:
        raise ModelUnreadable(files.id, f"tokenizer.json: {error}") from None


def _named_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    more = config.get("extra_special_tokens")
    named = {name: config[name] for name in NAMED_TOKENS if config.get(name)} | (more if isinstance(more, dict) else {})
    for name, token in named.items():
        yield name, token_text(token)


def _default_sampling(files: ModelFiles) -> pb.SamplingParams:
    sampling = pb.SamplingParams(frequency_penalty=0.0, presence_penalty=0.0, n=1)
    for name, value in files.default_sampling.items():
        setattr(sampling, name, int(value) if name == "top_k" else value)
    try:
        check_sampling(sampling)
    except InvalidArgument as error:
        raise ModelUnreadable(files.id, f"generation_config.json: {error}") from None
    return sampling
