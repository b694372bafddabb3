"""`/v1/completions`: options of a body, and OpenAI's objects of what the routers return."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from decant.client import Output, Prompt, Usage
from decant.gateway import body_fields, logprobs
from decant.gateway.errors import OF_HEADERS, refused
from decant.gateway.generation import Caller, GenerationRequest, Piece, answers, finish_reason, pieces, usage_object
from decant.protos import inference_pb2 as pb

KNOWN = (
    body_fields.SAMPLING
    | body_fields.EXTENSIONS
    | {"model", "prompt", "stream", "stream_options", "logprobs", "logit_bias", "echo", "best_of"}
)
NAMES: Mapping[str, str] = {**OF_HEADERS, "prompt_logprobs": "logprobs", "token_ids": "prompt"}
"""The body's names of Decant's fields that differ, for errors."""

DEFAULT_MAX_TOKENS = 16
"""Of OpenAI's API."""
MAX_PROMPTS = 1024


def request(body: Mapping[str, Any]) -> GenerationRequest:
    """Raises ApiError for what Decant does not do."""
    body_fields.check(body, KNOWN)
    options = body_fields.options_of(body, body_fields.SAMPLING | body_fields.EXTENSIONS)
    alternatives, has_echo = body_fields.count(body, "logprobs"), body_fields.flag(body, "echo")
    best_of = body_fields.count(body, "best_of")
    options |= {
        "model": body_fields.text(body, "model") or None,
        "max_tokens": DEFAULT_MAX_TOKENS if body.get("max_tokens") is None else body["max_tokens"],
        "logprobs": alternatives,
        "prompt_logprobs": alternatives if has_echo else None,
        "logit_bias": body_fields.bias(body),
        "echo": has_echo or None,
        "best_of": best_of if best_of != (body.get("n") or 1) else None,
    }
    return GenerationRequest(
        options={name: value for name, value in options.items() if value is not None},
        prompts=_prompts(body),
        is_stream=body_fields.flag(body, "stream"),
        includes_usage=body_fields.includes_usage(body),
    )


def _prompts(body: Mapping[str, Any]) -> Sequence[Prompt]:
    """One text, a list of texts, token ids, or a list of token ids."""
    given = body.get("prompt")
    prompts: Sequence[Any] = given if isinstance(given, list) and given and type(given[0]) is not int else [given]
    if len(prompts) > MAX_PROMPTS:
        raise refused("prompt", f"at most {MAX_PROMPTS} prompts", len(prompts))
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not _are_ids(prompt):
            where = "prompt" if prompts[0] is given else f"prompt[{index}]"
            raise refused(where, "a text, or a list of at least one token id", prompt)
    return prompts


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(id) is int and 0 <= id < 2**32 for id in prompt)


async def whole(caller: Caller, wanted: GenerationRequest, frame: Mapping[str, Any]) -> dict[str, Any]:
    """The answers of all prompts; `frame` has their id, time and model."""
    made = await answers(caller, wanted)
    choices = []
    for run, answer in enumerate(made):
        for output in answer.outputs:
            tokens = (*answer.prompt_logprobs, *output.logprobs)
            choice = _Choice(wanted, run, output.index)
            choices.append(choice.part(output.text, tokens, finish_reason(output.finished)))
    return {
        **frame,
        "model": frame["model"] or made[0].model,
        "object": "text_completion",
        "choices": choices,
        "usage": usage_object(answer.usage for answer in made),
    }


async def chunks(
    caller: Caller, wanted: GenerationRequest, frame: Mapping[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream; those of all prompts are mixed."""
    made: dict[str, Any] = {**frame, "object": "text_completion"}
    if wanted.includes_usage:
        made["usage"] = None
    choices: dict[tuple[int, int], _Choice] = {}
    usages: list[Usage | None] = []
    async with aclosing(pieces(caller, wanted)) as parts:
        async for piece in parts:
            made["model"] = frame["model"] or (piece.stream.started.model if piece.stream.started else "")
            for choice in _choices(choices, wanted, piece):
                yield {**made, "choices": [choice]}
            if piece.delta is None:
                usages.append(piece.stream.usage)
    if wanted.includes_usage:
        yield {**made, "choices": [], "usage": usage_object(usages)}


def _choices(
    choices: dict[tuple[int, int], _Choice], wanted: GenerationRequest, piece: Piece
) -> Iterator[dict[str, Any]]:
    ends: Sequence[Output] = piece.stream.outputs if piece.delta is None else ()
    for index in [piece.delta.index] if piece.delta is not None else [output.index for output in ends]:
        if (piece.run, index) not in choices:
            choices[piece.run, index] = _Choice(wanted, piece.run, index)
    if piece.delta is None:
        for output in ends:
            yield choices[piece.run, output.index].part("", (), finish_reason(output.finished))
        return
    choice, delta = choices[piece.run, piece.delta.index], piece.delta
    started = piece.stream.started
    tokens = delta.logprobs
    if choice.is_new and started is not None:
        tokens = (*started.prompt_logprobs, *tokens)
    if delta.text or tokens:
        yield choice.part(delta.text, tokens, None)


@dataclass
class _Choice:
    """One choice of an answer, whose parts follow each other."""

    request: GenerationRequest
    run: int
    output: int
    is_new: bool = True
    _offsets: logprobs.TextOffsets = field(default_factory=logprobs.TextOffsets)

    def part(self, text: str, tokens: Sequence[pb.TokenLogprob], reason: str | None) -> dict[str, Any]:
        alternatives = self.request.options.get("logprobs")
        made = None
        if alternatives is not None:
            self._offsets.add(text)
            made = logprobs.of_completion(tokens, self._offsets, alternatives) if tokens else None
        self.is_new = False
        return {
            "index": self.run * self.request.outputs_each + self.output,
            "text": text,
            "logprobs": made,
            "finish_reason": reason,
        }
