from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar, get_type_hints

from decant.client.options import Options

_P = ParamSpec("_P")
_R = TypeVar("_R")

OPTION_HELP = {
    "request_id": "id of the request, to resume or fetch it; unset: generated",
    "model": "id of a served model; unset: the server's default",
    "priority": "-1000 to 1000, larger is more urgent; 0",
    "lora_name": "name of one of the model's LoRA adapters (`list_models`); unset: none",
    "user": "your own end user, for the server's log",
    "parse_special_tokens": "texts of special tokens in the input are those tokens; True for a text, False in messages",
    "add_generation_prompt": "for messages: the chat template opens the assistant's turn; True",
    "tools": "for messages: functions that the model may call, as name, description and parameters (a JSON schema)",
    "tool_choice": '"auto"; "none": no calls; "required" or the name of a tool: at least one call',
    "reasoning": "for messages: True or False, if the chat template has a switch for reasoning",
    "continue_final_message": "for messages: the output continues the last one, of the assistant; False",
    "parallel_tool_calls": "for tools: false for at most one call in an answer",
    "temperature": "0 to 100; 0 always takes the most likely token; unset: the model's",
    "top_p": "share of probability to draw from, above 0, to 1; unset: the model's",
    "top_k": "number of most likely tokens to draw from, 0 for all; unset: the model's",
    "min_p": "minimum share of the most likely token's probability, 0 to 1; unset: the model's",
    "frequency_penalty": "-2 to 2, times a token's count in the output; 0",
    "presence_penalty": "-2 to 2, once for a token that is in the output; 0",
    "repetition_penalty": "above 0, to 10, counts prompt and output, 1 is off; unset: the model's",
    "seed": "the same seed, prompt and model give the same tokens on CPUs of one kind; unset: drawn",
    "n": "outputs for this prompt",
    "best_of": "outputs to generate, of which the n likeliest are returned; not in a stream",
    "logit_bias": "token id to a number from -100 to 100 that is added to its logit",
    "max_tokens": "maximum output tokens, from 1; unset: what the context length leaves",
    "max_reasoning_tokens": "for messages: maximum tokens of reasoning, whose end is forced then",
    "min_tokens": "no stop and no end of sequence before this many output tokens; 0",
    "stop": "a text or several that end the output",
    "stop_token_ids": "token ids that end the output",
    "ignore_eos": "the model's end of sequence does not end the output; False",
    "include_stop_in_output": "what stopped the output stays in it; False",
    "text": "return text; True",
    "token_ids": "return token ids; False. Token ids as input are the prompt",
    "logprobs": "logprobs of output tokens, with this many alternatives each; unset: none",
    "prompt_logprobs": "the same of the prompt's tokens; unset: none",
    "skip_special_tokens": "special tokens have no text; True",
    "echo": "the prompt's text precedes the output's; False",
    "json_schema": "JSON schema that the output follows, a str or a dict",
    "regex": "regular expression that the whole output matches",
    "ebnf_grammar": "grammar, in Lark's syntax, that the output follows",
    "structural_tag": "text with tags whose content follows a schema, as JSON or a dict",
    "choice": "texts of which the output is one",
    "json_object": "the output is a JSON object; False",
    "bypass_prefix_cache": "neither use nor leave a cached prefix; False",
    "cache_salt": "share a cached prefix only with requests of the same salt",
    "session_id": "requests of one session go to the same workers where possible",
    "on_disconnect": '"cancel" or "detach": what happens to the request when its stream is lost; "cancel"',
    "detach_ttl_ms": "milliseconds a detached request runs without a reader; unset: the server's limit",
    "min_chunk_tokens": "minimum tokens of a delta, except the last; 1",
}
"""Meaning, range and default."""

_WIDTH = max(map(len, OPTION_HELP))


def with_options(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Expand ``**options: Unpack[Options]`` in the docstring and the signature of ``method``."""
    lines = "\n".join(f"    {name:<{_WIDTH}}  {text}" for name, text in OPTION_HELP.items())
    intro = "Options, each of which may be None for its default:"
    method.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\n{intro}\n\n{lines}\n"
    hints = get_type_hints(Options)
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(name, keyword, default=None, annotation=hints[name]) for name in OPTION_HELP]
    signature = inspect.signature(method)
    parameters = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    method.__signature__ = signature.replace(parameters=[*parameters, *options])  # type: ignore[attr-defined]
    return method
