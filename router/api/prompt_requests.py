"""Requests for scores and embeddings, validated: the prompts that workers compute for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from decant.engine.request import MAX_LOGPROBS, MAX_PRIORITY
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.api.validation import salt_of
from decant.router.limits import MAX_CONTINUATIONS, MAX_EMBED_INPUTS, check_count, check_range
from decant.router.text.control_tokens import WrittenTokens
from decant.router.text.prompt import (
    check_fits,
    checked_ids,
    checked_tokens,
    prompt_ids,
    text_tokens,
    text_written,
)
from decant.router.text.served_model import ServedModel
from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import InvalidArgument
from decant.runtime.packed import pack

_POOLINGS = {
    pb.EmbedRequest.POOLING_UNSPECIFIED: wire.Embedding.POOLING_LAST,
    pb.EmbedRequest.POOLING_LAST: wire.Embedding.POOLING_LAST,
    pb.EmbedRequest.POOLING_MEAN: wire.Embedding.POOLING_MEAN,
}

_Item = TypeVar("_Item", pb.Continuation, pb.EmbedInput)


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Tokenizes the inputs of a call. Raises InvalidArgument, and QueueFull or DeadlineExceeded for a thread."""

    model: ServedModel
    context_length: int
    deadline: Deadline
    written: WrittenTokens | None

    async def text(self, field: str, text: str) -> list[int]:
        ids = await text_tokens(field, text, self.model, self.context_length, self.deadline, written=self.written)
        return checked_tokens(field, ids, self.model, self.context_length)

    async def ids(self, field: str, ids: Sequence[int]) -> list[int]:
        return await prompt_ids(f"{field}.ids", ids, self.model, self.context_length, self.deadline)

    async def continuation(
        self, field: str, item: pb.Continuation, request: pb.ScoreRequest, prompt: list[int]
    ) -> list[int]:
        """Tokens of prompt and continuation together."""
        if item.WhichOneof("input") == "text":
            whole = await self._joined(f"{field}.text", item.text, request, prompt)
        elif not (ids := item.token_ids.ids):
            raise InvalidArgument(f"{field}.token_ids.ids", "at least 1 token", 0)
        else:
            check_fits(f"{field}.token_ids.ids", len(prompt) + len(ids), self.context_length)
            whole = prompt + await checked_ids(f"{field}.token_ids.ids", ids, self.model, self.deadline)
        return whole

    async def _joined(self, field: str, text: str, request: pb.ScoreRequest, prompt: list[int]) -> list[int]:
        if not text:
            raise InvalidArgument(field, "at least 1 character", 0)
        if request.WhichOneof("input") == "token_ids":
            raise InvalidArgument(field, "unset where the prompt is token_ids: send token_ids", text)
        whole = await self.text(field, request.prompt + text)
        if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
            limit = (
                "a text after which the prompt has the same tokens as without it: begin it at a word, with its space"
            )
            raise InvalidArgument(field, limit, text)
        return whole


def check_items(field: str, items: Sequence[_Item], most: int, priority: int) -> None:
    """Check what costs nothing to check, before any text is tokenized."""
    if not items:
        raise InvalidArgument(field, f"1 to {most}", 0)
    check_count(field, len(items), most, field.replace("_", " "))
    for place, item in enumerate(items):
        if item.WhichOneof("input") is None:
            raise InvalidArgument(f"{field}[{place}]", "a text or token_ids", "none", reason=Reason.EMPTY_PROMPT)
    check_range("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)


def check_score(request: pb.ScoreRequest) -> None:
    check_items("continuations", request.continuations, MAX_CONTINUATIONS, request.priority)
    check_count("logprobs", request.logprobs, MAX_LOGPROBS, "alternatives")
    if request.HasField("parse_special_tokens") and request.WhichOneof("input") == "token_ids":
        raise InvalidArgument("parse_special_tokens", "unset with token_ids", request.parse_special_tokens)


def check_embed(request: pb.EmbedRequest) -> None:
    check_items("inputs", request.inputs, MAX_EMBED_INPUTS, request.priority)
    if request.pooling not in _POOLINGS:
        raise InvalidArgument("pooling", "a value of its enum", request.pooling)
    if request.HasField("dimensions") and not request.dimensions:
        raise InvalidArgument("dimensions", "from 1", 0)


async def score_prompts(
    request: pb.ScoreRequest, model: ServedModel, context_length: int, deadline: Deadline
) -> tuple[list[int], list[list[int]]]:
    """Tokens of the prompt, and of the prompt with each continuation."""
    reader = PromptReader(model, context_length, deadline, text_written(request))
    if request.WhichOneof("input") == "token_ids":
        prompt = await reader.ids("token_ids", request.token_ids.ids)
    else:
        prompt = await reader.text("prompt", request.prompt)
    wholes = [
        await reader.continuation(f"continuations[{place}]", item, request, prompt)
        for place, item in enumerate(request.continuations)
    ]
    return prompt, wholes


async def embed_prompts(
    request: pb.EmbedRequest, model: ServedModel, context_length: int, deadline: Deadline
) -> list[list[int]]:
    reader = PromptReader(model, context_length, deadline, text_written(request))
    return [
        await reader.text(f"inputs[{place}].text", item.text)
        if item.WhichOneof("input") == "text"
        else await reader.ids(f"inputs[{place}].token_ids", item.token_ids.ids)
        for place, item in enumerate(request.inputs)
    ]


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """What computes a call's prompts, and for which tenant. ``adapter``: its digest, empty for none."""

    model: ServedModel
    adapter: str
    tenant: str


def score_requests(
    request: pb.ScoreRequest, target: EngineTarget, prompt: Sequence[int], wholes: Sequence[Sequence[int]]
) -> list[wire.EngineRequest]:
    base = _engine_request(target, request.cache_salt, request.priority)
    base.prompt_logprobs, base.prompt_logprobs_from = request.logprobs, len(prompt)
    return [_with_prompt(base, whole) for whole in wholes]


def embed_requests(
    request: pb.EmbedRequest, target: EngineTarget, prompts: Sequence[Sequence[int]]
) -> list[wire.EngineRequest]:
    base = _engine_request(target, request.cache_salt, request.priority)
    base.embedding.pooling = _POOLINGS[request.pooling]
    base.embedding.normalize = request.normalize if request.HasField("normalize") else True
    if request.HasField("dimensions"):
        base.embedding.dimensions = request.dimensions
    return [_with_prompt(base, prompt) for prompt in prompts]


def _engine_request(target: EngineTarget, cache_salt: str, priority: int) -> wire.EngineRequest:
    return wire.EngineRequest(
        model=target.model.id,
        adapter=target.adapter,
        outputs=[wire.OutputPrefix()],
        sampling=wire.Sampling(top_p=1.0, repetition_penalty=1.0),
        stopping=wire.Stopping(max_tokens=1),
        priority=priority,
        salt=salt_of(target.tenant, cache_salt),
    )


def _with_prompt(base: wire.EngineRequest, prompt: Sequence[int]) -> wire.EngineRequest:
    request = wire.EngineRequest()
    request.CopyFrom(base)
    request.prompt = pack(prompt)
    return request
