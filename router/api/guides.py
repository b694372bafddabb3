"""Guide of a request: GuidedDecoding, or the grammar of an answer whose calls of tools have rules."""

from __future__ import annotations

from typing import Any

from decant.engine.errors import InvalidRequest
from decant.engine.guides.guide import Guide, GuideKind
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.text.answer_grammar import answer_grammar, guide_after_reasoning
from decant.router.text.reasoning.formats import Reasoning
from decant.router.text.served_model import ServedModel
from decant.router.text.structural_tags import structural_tag_grammar
from decant.router.text.tools.call_options import call_rules
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument


async def guide_of(
    request: pb.GenerateRequest, reasoning: Reasoning | None, model: ServedModel, deadline: Deadline
) -> wire.Guide | None:
    """Guide of a request whose output may begin with ``reasoning``, of which the model's workers can compile a grammar.

    Raises InvalidArgument; QueueFull or DeadlineExceeded where it waits for others to be compiled.
    """
    guide = _guide(request, reasoning, model)
    if guide is None:
        return None
    _check_stopping(request.stopping, "messages.tools" if guide.kind is GuideKind.ANSWER else "guided")
    if model.guides is None:
        raise InvalidArgument(guide.field, "unset for this model", guide.kind)
    await model.guides.check(guide, deadline)
    if reasoning is not None and guide.kind is not GuideKind.ANSWER:
        guide = Guide(GuideKind.ANSWER, guide_after_reasoning(guide.grammar(), reasoning, model.terms), (), guide.field)
        await model.guides.check(guide, deadline)
    if guide.kind is GuideKind.ANSWER:
        return wire.Guide(answer=guide.text, answer_field=guide.answer_field)
    if guide.kind is GuideKind.STRUCTURAL_TAG:
        return wire.Guide(structural_tag=guide.text)
    return wire.Guide.FromString(request.guided.SerializeToString())


def _guide(request: pb.GenerateRequest, reasoning: Reasoning | None, model: ServedModel) -> Guide | None:
    kind = request.guided.WhichOneof("guide")
    if kind is None and request.HasField("guided"):
        raise InvalidArgument("guided", "one of its fields", "none")
    rules = call_rules(request.messages, model.call_format, model.id)
    try:
        if rules is None:
            return None if kind is None else _guide_of_kind(kind, getattr(request.guided, kind), model)
        if kind is not None:
            limit = "unset where tool_choice, strict tools or parallel_tool_calls give the answer a grammar"
            raise InvalidArgument("guided", limit, kind)
        assert model.call_format is not None
        return Guide(GuideKind.ANSWER, answer_grammar(model.call_format, rules, model.terms, reasoning))
    except InvalidRequest as error:
        raise InvalidArgument(error.field, error.limit, error.value) from None


def _guide_of_kind(kind: str, value: Any, model: ServedModel) -> Guide:
    guide = Guide.of(kind, value)
    if guide.kind is GuideKind.GRAMMAR and (token := model.terms.end_token_in(guide.text)) is not None:
        raise InvalidRequest(guide.field, "a grammar without end tokens, at which an output ends", token)
    if guide.kind is not GuideKind.STRUCTURAL_TAG:
        return guide
    return Guide(GuideKind.STRUCTURAL_TAG, structural_tag_grammar(guide.text, model.terms.of))


def _check_stopping(stopping: pb.StoppingParams, field: str) -> None:
    if stopping.min_tokens:
        limit = f"0 with {field}, whose grammar says where the output may end"
        raise InvalidArgument("stopping.min_tokens", limit, stopping.min_tokens)
    if stopping.ignore_eos:
        limit = f"false with {field}, after whose grammar the output ends"
        raise InvalidArgument("stopping.ignore_eos", limit, True)
