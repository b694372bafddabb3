"""Bodies of OpenAI's API -> requests of decant.v1; what Decant does not do is refused by its name."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from decant.client.options import named_request
from decant.gateway import body_fields, chat, completions, embeddings
from decant.gateway.errors import ApiError, error_object
from decant.protos import inference_pb2 as pb
from decant.runtime.errors import InvalidArgument, ServiceError

MESSAGES: Any = [{"role": "user", "content": "hi"}]
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

JSON_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
NO_TEXTS: list[Any] = [0, False, [], {}]


def with_schema(**fields: Any) -> Any:
    return {**JSON_SCHEMA, "json_schema": {**JSON_SCHEMA["json_schema"], **fields}}


def of_chat(**fields: Any) -> pb.GenerateRequest:
    wanted = chat.request({"messages": MESSAGES, **fields})
    options: Any = wanted.options
    return named_request(None, wanted.messages, options)


def of_completion(**fields: Any) -> pb.GenerateRequest:
    wanted = completions.request({"prompt": "x", **fields})
    (prompt,), options = wanted.prompts, wanted.options
    return named_request(prompt, None, options)  # type: ignore[arg-type]


def given(message: Any) -> dict[str, Any]:
    """The fields that are set, flat; without id and input."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name in ("request_id", "messages", "prompt", "token_ids"):
            continue
        if field.message_type is not None and not field.is_repeated:
            found |= given(value)
        else:
            found[field.name] = (
                dict(value) if field.name == "logit_bias" else list(value) if field.is_repeated else value
            )
    return found


BOTH = [
    ({"model": "m", "user": "u"}, {"model": "m", "user": "u"}),
    ({"temperature": 0, "top_p": 0.5}, {"temperature": 0, "top_p": 0.5}),
    ({"frequency_penalty": 0.5, "presence_penalty": -1}, {"frequency_penalty": 0.5, "presence_penalty": -1}),
    ({"seed": 5, "n": 2}, {"seed": 5, "n": 2}),
    ({"stop": "a"}, {"stop": ["a"]}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"max_tokens": 7}, {"max_tokens": 7}),
    ({"logit_bias": {"5": -100}}, {"logit_bias": {5: -100}}),
    ({"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}, {}),
    ({"top_k": 4, "ignore_eos": True, "priority": 9}, {"top_k": 4, "ignore_eos": True, "priority": 9}),
    ({"regex": "a+", "cache_salt": "s"}, {"regex": "a+", "cache_salt": "s"}),
    ({"temperature": None, "unknown": None}, {}),
]
CHATS = [
    ({"max_completion_tokens": 7}, {"max_tokens": 7}),
    ({"max_completion_tokens": 7, "max_tokens": 7}, {"max_tokens": 7}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
    ({"logprobs": False, "top_logprobs": 0}, {}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
    ),
    ({"safety_identifier": "s"}, {"user": "s"}),
    ({"prompt_cache_key": "k"}, {"session_id": "k"}),
    ({"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"]}, {}),
    ({"verbosity": "medium", "prompt_cache_retention": "in_memory"}, {}),
]
COMPLETIONS = [
    ({"logprobs": 2}, {"logprobs": 2}),
    ({"logprobs": 2, "echo": True}, {"logprobs": 2, "prompt_logprobs": 2, "echo": True}),
    ({"best_of": 1, "suffix": ""}, {}),
    ({"best_of": 3, "n": 2}, {"best_of": 3, "n": 2}),
]


@pytest.mark.parametrize(("fields", "expected"), [*BOTH, *CHATS])
def test_fields_of_a_chat_reach_the_routers(fields: Any, expected: Any) -> None:
    assert given(of_chat(**fields)) == expected


@pytest.mark.parametrize(("fields", "expected"), [*BOTH, *COMPLETIONS])
def test_fields_of_a_completion_reach_the_routers(fields: Any, expected: Any) -> None:
    default = {"max_tokens": completions.DEFAULT_MAX_TOKENS}
    assert given(of_completion(**fields)) == default | expected


def test_messages_and_tools_reach_the_routers() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}
    sent = of_chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
            {**answer, "reasoning_content": "so"},
            {"role": "tool", "content": "5", "tool_call_id": "c"},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
        reasoning_effort="none",
    ).messages
    assert [message.role for message in sent.messages] == ["system", "user", "assistant", "tool"]
    assert (sent.messages[1].parts[0].text, sent.messages[1].name) == ("hi", "ann")
    assert (sent.messages[2].tool_calls[0].name, sent.messages[2].reasoning) == ("f", "so")
    assert sent.messages[3].tool_call_id == "c"
    assert (sent.tools[0].name, sent.tool_choice.name) == ("f", "f")
    assert (sent.parallel_tool_calls, sent.reasoning) == (False, False)
    assert of_chat(reasoning_effort="low").messages.reasoning


def test_prompts_are_texts_or_token_ids() -> None:
    assert completions.request({"prompt": "a"}).prompts == ["a"]
    assert completions.request({"prompt": ["a", "b"]}).prompts == ["a", "b"]
    assert completions.request({"prompt": [5, 6]}).prompts == [[5, 6]]
    assert completions.request({"prompt": [[5], [6, 7]]}).prompts == [[5], [6, 7]]


REFUSED_BOTH: list[tuple[Any, str]] = [
    ({"temprature": 1}, "temprature"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"model": 5}, "model"),
]
REFUSED_CHATS: list[tuple[Any, str]] = [
    *(({name: {}}, name) for name in sorted(body_fields.REFUSED)),
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"metadata": "a"}, "metadata"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
    ({"response_format": {**JSON_SCHEMA, "strict": True}}, "response_format.strict"),
    ({"response_format": with_schema(name=5)}, "response_format.json_schema.name"),
    ({"response_format": with_schema(strict="yes")}, "response_format.json_schema.strict"),
    ({"response_format": with_schema(schemata={})}, "response_format.json_schema.schemata"),
    *(({name: value}, name) for name in ("user", "safety_identifier", "prompt_cache_key") for value in NO_TEXTS),
    ({"reasoning": {}}, "reasoning"),
    ({"reasoning": True, "reasoning_effort": "none"}, "reasoning"),
]
REFUSED_COMPLETIONS: list[tuple[Any, str]] = [
    ({"suffix": "b"}, "suffix"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"best_of": True}, "best_of"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"messages": MESSAGES}, "messages"),
]


@pytest.mark.parametrize(
    ("send", "fields", "param"),
    [
        *((of_chat, fields, param) for fields, param in [*REFUSED_BOTH, *REFUSED_CHATS]),
        *((of_completion, fields, param) for fields, param in [*REFUSED_BOTH, *REFUSED_COMPLETIONS]),
    ],
)
def test_what_decant_does_not_do_is_refused_by_name(send: Any, fields: Any, param: str) -> None:
    with pytest.raises(ApiError) as refusal:
        send(**fields)
    error = refusal.value.error
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("send", "fields", "param"),
    [
        (of_completion, {"choice": ["a"], "regex": "b"}, "choice"),
        (of_completion, {"ebnf_grammar": "a", "regex": "b"}, "ebnf_grammar"),
        (of_completion, {"user": []}, "user"),
        (of_chat, {"response_format": {"type": "json_object"}, "regex": "b"}, "response_format"),
        (of_chat, {"tools": [{"type": "custom", "function": TOOL["function"]}]}, "tools[0]"),
        (of_chat, {"tools": [{**TOOL, "strict": True}]}, "tools[0]"),
        (of_chat, {"tools": [TOOL], "tool_choice": {"type": "bogus", "function": {"name": "f"}}}, "tool_choice"),
    ],
)
def test_what_decants_client_refuses_has_the_bodys_name(send: Any, fields: Any, param: str) -> None:
    with pytest.raises(ServiceError) as refusal:
        send(**fields)
    error = error_object(refusal.value, chat.NAMES if send is of_chat else completions.NAMES)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(f"{param}: ")


def test_a_refused_effort_has_its_name() -> None:
    error = error_object(InvalidArgument("messages.reasoning", "unset for this model", True), chat.NAMES)
    assert (error.param, error.message) == ("reasoning_effort", "reasoning_effort: unset for this model, got True")


@pytest.mark.parametrize(
    ("params", "known"),
    [
        (chat_create_params.CompletionCreateParamsBase, chat.KNOWN),
        (completion_create_params.CompletionCreateParamsBase, completions.KNOWN),
        (embedding_create_params.EmbeddingCreateParams, embeddings.KNOWN),
    ],
)
def test_each_field_of_openais_api_is_decided_about(params: Any, known: Any) -> None:
    decided = known | body_fields.NEUTRAL.keys() | body_fields.REFUSED
    assert get_type_hints(params).keys() <= decided, "sort new ones into the tables of body_fields"
