"""What a request wants of calls in its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from decant.engine.errors import InvalidRequest
from decant.engine.guides.json_schema import check_schema
from decant.protos import inference_pb2 as pb
from decant.router.text.answer_grammar import CallRules
from decant.router.text.conversation import offered_tools
from decant.router.text.output_text import OutputOptions
from decant.router.text.served_model import ServedModel
from decant.router.text.tools.call_format import PARAMETERS, CallFormat
from decant.router.text.tools.call_parser import CallParser, PlainText
from decant.router.text.tools.xml_grammar import check_parameters
from decant.runtime.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class CallOptions:
    form: CallFormat
    tools: Mapping[str, str]
    """Parameters of the tools that may be called, by their names."""
    key: str
    """What the ids of calls are made from."""
    hidden: tuple[str, ...] = ()
    """Special tokens of the format, which have no text outside of calls."""

    def parser(self, output: int) -> PlainText:
        return CallParser(self.form, self.tools, f"{self.key}/{output}", self.hidden)


def with_calls(options: OutputOptions, request: pb.GenerateRequest, model: ServedModel, key: str) -> OutputOptions:
    """Options of a request whose tools may be called. Raises InvalidArgument."""
    tools = {tool.name: tool.parameters for tool in offered_tools(request.messages)}
    if not tools or model.call_format is None:
        return options
    if not options.text:
        raise InvalidArgument("response.text", "true where messages.tools may be called", False)
    shown = _special_tokens(model.call_format, model) if options.skip_special_tokens else {}
    calls = CallOptions(model.call_format, tools, key, tuple(shown.values()))
    return replace(options, shown_tokens=shown, new_call_parser=calls.parser)


def call_rules(messages: pb.Messages, form: CallFormat | None, model: str) -> CallRules | None:
    """What an answer's calls have to be; None if the model decides that. Raises InvalidArgument."""
    tools, choice = offered_tools(messages), messages.tool_choice
    is_required = choice.mode == pb.ToolChoice.MODE_REQUIRED or choice.HasField("name")
    is_single = messages.HasField("parallel_tool_calls") and not messages.parallel_tool_calls
    strict = next((place for place, tool in enumerate(tools) if tool.strict), None)
    if not tools or not (is_required or is_single or strict is not None):
        return None
    if form is None:
        field, value = _field_of_rules(messages, is_required, strict)
        raise InvalidArgument(field, f"a model whose template declares a format of calls, which {model} is not", value)
    callable_ = [pair for pair in enumerate(tools) if not choice.HasField("name") or pair[1].name == choice.name]
    return CallRules(
        {tool.name: _arguments(place, tool, form) for place, tool in callable_}, is_required, not is_single
    )


def _field_of_rules(messages: pb.Messages, is_required: bool, strict: int | None) -> tuple[str, object]:
    """The field that requires a grammar, and its value."""
    if is_required:
        return "messages.tool_choice", str(messages.tool_choice).strip()
    if strict is not None:
        return f"messages.tools[{strict}].strict", True
    return "messages.parallel_tool_calls", False


def _arguments(place: int, tool: pb.Tool, form: CallFormat) -> Mapping[str, Any]:
    """Schema that a call's arguments follow. Raises InvalidArgument."""
    if not tool.strict:
        return {"type": "object"}
    field = f"messages.tools[{place}].parameters"
    try:
        schema = check_schema(field, tool.parameters or '{"properties": {}, "additionalProperties": false}')
        if schema.setdefault("type", "object") != "object":
            raise InvalidArgument(field, 'a schema of type "object"', schema["type"])
        if PARAMETERS in form.written.call:
            check_parameters(field, schema)
    except InvalidRequest as error:
        raise InvalidArgument(error.field, error.limit, error.value) from None
    return schema


def _special_tokens(form: CallFormat, model: ServedModel) -> Mapping[int, str]:
    literals = form.literals
    special = model.token_table.special_tokens.items()
    return {id: text for text, id in special if any(text in literal for literal in literals)}
