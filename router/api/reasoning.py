"""Reasoning that a request's outputs may have, and its limit."""

from __future__ import annotations

from collections.abc import Sequence

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.text.reasoning.formats import Reasoning
from decant.router.text.served_model import ServedModel
from decant.runtime.errors import InvalidArgument
from decant.runtime.packed import pack


def reasoning_after(request: pb.GenerateRequest, prompt: Sequence[int], model: ServedModel) -> Reasoning | None:
    """Reasoning of the outputs; None: there is none, or it is not marked."""
    if model.reasoning is None or not request.HasField("messages"):
        return None
    is_continued = request.messages.continue_final_message
    return model.reasoning.after(prompt, model.token_table, is_continued=is_continued)


def reasoning_limit(
    stopping: pb.StoppingParams, reasoning: Reasoning | None, model: ServedModel
) -> wire.ReasoningLimit | None:
    """Limit of the reasoning. Raises InvalidArgument."""
    if not stopping.HasField("max_reasoning_tokens"):
        return None
    field = "stopping.max_reasoning_tokens"
    if reasoning is None:
        limit = "unset but for messages to a model that may reason, whose template declares it"
        raise InvalidArgument(field, limit, stopping.max_reasoning_tokens)
    markers = reasoning.markers
    if markers.end in stopping.stop_token_ids or markers.end in model.eos_token_ids:
        limit = f"unset where token {markers.end}, the end of reasoning, ends the output"
        raise InvalidArgument(field, limit, stopping.max_reasoning_tokens)
    return wire.ReasoningLimit(
        begin=pack(markers.begin),
        end=markers.end,
        is_open=markers.is_open,
        max_tokens=stopping.max_reasoning_tokens,
    )
