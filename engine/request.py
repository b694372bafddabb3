"""Requests to an engine. Constructors raise InvalidRequest, as does ``Engine.add`` for what depends on the model."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

from decant.engine.block_hashes import cache_salt
from decant.engine.errors import InvalidRequest
from decant.engine.guides.compiler import Grammar
from decant.engine.guides.mask import GuideMask
from decant.engine.logits_processors import Bias, LogitsProcessor, MinLength, Penalties
from decant.engine.reasoning import ReasoningBudget, ReasoningLimit

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0  # also below 0
MAX_PRIORITY = 1000  # also below 0
MAX_TOP_K = 2**31 - 1
MAX_DIGEST_BYTES = 64
"""Of an adapter's digest."""
SAMPLING_RANGES = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
SAMPLING_ABOVE_ZERO = {"top_p": 1.0, "repetition_penalty": 10.0}
"""Maximum of parameters that are above 0."""

_MIN_TEMPERATURE = 1e-5
"""Below it sampling is greedy: division by it would overflow."""


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(name, f"a number from {low:g} to {high:g}", value)


def _check_above_zero(name: str, value: float, high: float) -> None:
    if not isinstance(value, int | float) or not 0.0 < value <= high:
        raise InvalidRequest(name, f"above 0 and at most {high:g}", value)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(name, f"a whole number from {low} to {high}", value)


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    CONTEXT_LENGTH = "context_length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of each token; ``temperature`` below 1e-5 is greedy, ``top_k`` 0 and ``top_p`` 1 are off.

    Order: logit bias, minimum length, penalties, grammar, temperature, top-k, top-p, min-p, one draw. The repetition
    penalty is CTRL's (of prompt and output; divides positive logits), presence and frequency penalty are the OpenAI
    API's (of the output; subtracted).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    output_index: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in SAMPLING_RANGES.items():
            _check_range(name, getattr(self, name), low, high)
        for name, high in SAMPLING_ABOVE_ZERO.items():
            _check_above_zero(name, getattr(self, name), high)
        _check_int("top_k", self.top_k, 0, MAX_TOP_K)
        _check_int("seed", self.seed, 0, 2**64 - 1)
        _check_int("output_index", self.output_index, 0, 2**32 - 1)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest("logit_bias", "token ids with a number each", self.logit_bias)
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, -(2**63), 2**63 - 1)  # the vocabulary has its own check
            _check_range(f"logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _MIN_TEMPERATURE

    @property
    def penalties(self) -> tuple[float, float, float]:
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty


@dataclass(frozen=True, slots=True)
class StopParams:
    """End of a sequence: without ``max_tokens`` at the context length. No stop token is drawn before ``min_tokens``."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if not isinstance(self.stop_token_ids, Set):
            raise InvalidRequest("stop_token_ids", "a set of token ids", self.stop_token_ids)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"at most max_tokens {self.max_tokens}", self.min_tokens)

    def ids(self, eos: Set[int]) -> Set[int]:
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | eos


class Pooling(enum.Enum):
    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class EmbeddingParams:
    """Embedding of a prompt from the hidden states after the model's last norm: of the last token, or their mean.

    ``dimensions``: how many leading values to keep, None: all. ``normalize``: scale what is kept to length 1.
    """

    pooling: Pooling = Pooling.LAST
    dimensions: int | None = None
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            _check_int("dimensions", self.dimensions, 1, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue.

    token_ids         the prompt, and the output so far if another engine started the request
    prompt_tokens     how many of them are prompt; None: all
    logprobs, prompt_logprobs  alternatives per token; 0: the token's own alone; None: no log-probabilities
    prompt_logprobs_from  first prompt position that gets log-probabilities; a prefix cache may serve those before it
    embedding         return the prompt's embedding; with ``max_tokens`` 1 and no output yet
    salt              prefix caches of different salts are separate, as those of different adapters
    adapter           digest of the adapter that it is computed with; empty: none
    grammar           what the output's text must match; None: nothing
    reasoning         limit of the tokens of its reasoning; None: no limit
    park_after        output tokens after which the sequence keeps its blocks unscheduled, for a handoff; None: never
    """

    id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int | None = None
    sampling: SamplingParams = SamplingParams()
    stop: StopParams = StopParams()
    priority: int = 0
    salt: bytes = b""
    use_prefix_cache: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 1
    embedding: EmbeddingParams | None = None
    grammar: Grammar | None = None
    reasoning: ReasoningLimit | None = None
    park_after: int | None = None
    adapter: str = ""
    cache_salt: bytes = field(init=False, repr=False, compare=False)
    """Of ``salt`` and ``adapter``: only sequences with an equal one share blocks."""
    prompt_len: int = field(init=False, repr=False, compare=False)
    is_plain_greedy: bool = field(init=False, repr=False, compare=False)
    """Every token is the likeliest by the model's own logits."""
    needs_tokens_only: bool = field(init=False, repr=False, compare=False)
    """``is_plain_greedy``, and without any log-probabilities or embedding."""

    def __post_init__(self) -> None:
        self._check()
        # Derived once: every step reads them of every sequence.
        object.__setattr__(self, "cache_salt", cache_salt(self.salt, self.adapter))
        object.__setattr__(self, "prompt_len", self.prompt_tokens or len(self.token_ids))
        object.__setattr__(self, "is_plain_greedy", self.sampling.is_greedy and not self.logits_processors())
        more = (self.logprobs, self.prompt_logprobs, self.embedding)
        object.__setattr__(self, "needs_tokens_only", self.is_plain_greedy and all(each is None for each in more))

    def logits_processors(self) -> tuple[LogitsProcessor, ...]:
        """Make what changes the logits of a draw, in the order of application: the one list of such fields."""
        sampling, stop = self.sampling, self.stop
        processors: list[LogitsProcessor] = []
        if sampling.logit_bias:
            processors.append(Bias(sampling.logit_bias))
        if stop.min_tokens and (stop.stop_token_ids or not stop.ignore_eos):
            processors.append(MinLength(self.prompt_len + stop.min_tokens, stop.ids))
        if sampling.penalties != (1.0, 0.0, 0.0):
            processors.append(Penalties(self.prompt_len, *sampling.penalties))
        if self.grammar is not None:
            processors.append(GuideMask(self.prompt_len, self.grammar))
        if self.reasoning is not None:
            processors.append(ReasoningBudget(self.prompt_len, self.reasoning))
        return tuple(processors)

    @property
    def computes_from(self) -> int | None:
        """First position that no prefix cache may serve, as its logits or hidden states are returned; None: any may."""
        if not self.use_prefix_cache or (self.embedding is not None and self.embedding.pooling is Pooling.MEAN):
            return 0
        return None if self.prompt_logprobs is None else self.prompt_logprobs_from - 1

    def next_check_length(self, length: int, context_length: int) -> int:
        lengths = [context_length]
        if self.stop.max_tokens is not None:
            lengths.append(self.prompt_len + self.stop.max_tokens)
        if self.park_after is not None and self.prompt_len + self.park_after > length:
            lengths.append(self.prompt_len + self.park_after)
        return min(lengths)

    def _check(self) -> None:
        if not self.id:
            raise InvalidRequest("id", "not empty", self.id)
        if not self.token_ids:
            raise InvalidRequest("token_ids", "at least 1 token", 0)
        if self.prompt_tokens is not None:
            _check_int("prompt_tokens", self.prompt_tokens, 1, len(self.token_ids))
        _check_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)
        _check_int("prompt_logprobs_from", self.prompt_logprobs_from, 1, 2**31 - 1)
        if self.embedding is not None and self.stop.max_tokens != 1:
            raise InvalidRequest("max_tokens", "1 with an embedding", self.stop.max_tokens)
        if len(self.adapter.encode()) > MAX_DIGEST_BYTES:
            raise InvalidRequest("adapter", f"at most {MAX_DIGEST_BYTES} bytes", self.adapter)
        if self.park_after is not None:
            _check_int("park_after", self.park_after, 1, 2**31 - 1)
        if self.grammar is not None:
            check_stop_with_grammar(self.stop)


def check_stop_with_grammar(stop: StopParams) -> None:
    if stop.min_tokens:
        raise InvalidRequest("min_tokens", "0 with a guide, which says where the output may end", stop.min_tokens)
    if stop.ignore_eos:
        raise InvalidRequest("ignore_eos", "false with a guide, after which the output ends", stop.ignore_eos)


def check_tokens(field: str, tokens: Collection[int], vocabulary: int) -> None:
    try:
        valid = max(array("Q", tokens), default=0) < vocabulary
    except (TypeError, OverflowError):
        valid = False
    if not valid:
        worst = next((token for token in tokens if not (isinstance(token, int) and 0 <= token < vocabulary)), None)
        raise InvalidRequest(field, f"token ids from 0 to {vocabulary - 1}", worst)


def check_tokens_remain(stop: StopParams, eos: Set[int], vocabulary: int) -> None:
    forbidden = stop.ids(eos)
    if stop.min_tokens and len(forbidden) >= vocabulary:
        limit = f"at most {vocabulary - 1} with the model's own end tokens, for min_tokens forbids them"
        raise InvalidRequest("stop_token_ids", limit, len(forbidden))


def check_embedding(embedding: EmbeddingParams, size: int) -> None:
    """``size``: values of an embedding, 0 if the device returns none."""
    if not size:
        raise InvalidRequest("pooling", "unset on this device, which returns no embeddings", embedding.pooling.value)
    if embedding.dimensions is not None and embedding.dimensions > size:
        raise InvalidRequest("dimensions", f"at most {size}", embedding.dimensions)


def check_request(request: Request, vocabulary: int, eos: Set[int], context_length: int) -> None:
    if len(request.token_ids) > context_length:
        raise InvalidRequest("token_ids", f"at most {context_length} tokens", len(request.token_ids))
    check_tokens("token_ids", request.token_ids, vocabulary)
    check_tokens("stop_token_ids", request.stop.stop_token_ids, vocabulary)
    check_tokens("logit_bias", tuple(request.sampling.logit_bias), vocabulary)
    check_tokens_remain(request.stop, eos, vocabulary)
    if request.reasoning is not None:
        check_tokens("reasoning", (request.reasoning.highest_token,), vocabulary)
    if request.grammar is not None:
        request.grammar.prepare()
    generated = len(request.token_ids) - request.prompt_len
    if request.stop.max_tokens is not None and generated >= request.stop.max_tokens:
        raise InvalidRequest("max_tokens", f"above {generated}, the tokens already generated", request.stop.max_tokens)
    if generated and len(request.token_ids) >= context_length:
        raise InvalidRequest("token_ids", f"less than {context_length} tokens with output", len(request.token_ids))
