"""What a request wants of calls in its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from decant.protos import inference_pb2 as pb
from decant.router.text.conversation import offered_tools
from decant.router.text.output_text import OutputOptions
from decant.router.text.served_model import ServedModel
from decant.router.text.tools.call_format import CallFormat
from decant.router.text.tools.call_parser import CallParser, PlainText
from decant.runtime.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class CallOptions:
    form: CallFormat
    tools: frozenset[str]
    """Names of the tools that may be called."""
    key: str
    """What the ids of calls are made from."""
    hidden: tuple[str, ...] = ()
    """Special tokens of the format, which have no text outside of calls."""

    def parser(self, output: int) -> PlainText:
        return CallParser(self.form, self.tools, f"{self.key}/{output}", self.hidden)


def with_calls(options: OutputOptions, request: pb.GenerateRequest, model: ServedModel, key: str) -> OutputOptions:
    """Options of a request whose tools may be called. Raises InvalidArgument."""
    tools = frozenset(tool.name for tool in offered_tools(request.messages))
    if not tools or model.call_format is None:
        return options
    if not options.text:
        raise InvalidArgument("response.text", "true where messages.tools may be called", False)
    shown = _special_tokens(model.call_format, model) if options.skip_special_tokens else {}
    calls = CallOptions(model.call_format, tools, key, tuple(shown.values()))
    return replace(options, shown_tokens=shown, new_call_parser=calls.parser)


def _special_tokens(form: CallFormat, model: ServedModel) -> Mapping[int, str]:
    literals = form.literals
    special = model.token_table.special_tokens.items()
    return {id: text for text, id in special if any(text in literal for literal in literals)}
