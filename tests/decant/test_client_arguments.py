from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from typing import Any

import pytest

import decant
from decant import AsyncClient, Client
from decant.client.option_help import OPTION_HELP
from decant.client.options import Options, request
from decant.protos import inference_pb2 as pb


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "a text, token ids or messages, or messages=: neither is given"),
        (
            {"prompt": "x", "messages": [{"role": "user"}]},
            "a text, token ids or messages, or messages=: both are given",
        ),
        ({"prompt": "x", "max_token": 3}, "no such option: max_token; did you mean max_tokens?"),
    ],
)
def test_missing_conflicting_or_unknown_arguments_are_type_errors(client: Client, arguments: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        client.generate(**arguments)
    assert str(caught.value) == message


PROMPT = "prompt: a text, token ids or messages"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": "3"}, "max_tokens: an int, got '3'"),
        ({"max_tokens": -1}, "max_tokens: an int from 0 to 4294967295, got -1"),
        ({"top_k": 2**31}, "top_k: an int from -2147483648 to 2147483647, got 2147483648"),
        ({"seed": 1.5}, "seed: an int, got 1.5"),
        ({"temperature": "hot"}, "temperature: a number, got 'hot'"),
        ({"ignore_eos": "yes"}, "ignore_eos: True or False, got 'yes'"),
        ({"stop": 5}, "stop: a text or a list of texts, got 5"),
        ({"stop_token_ids": 5}, "stop_token_ids: a list of ints from 0, got 5"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: a list of ints from 0, got ['a']"),
        ({"logit_bias": [1]}, "logit_bias: a dict of token ids and numbers, got [1]"),
        ({"on_disconnect": "stay"}, "on_disconnect: 'cancel' or 'detach', got 'stay'"),
        ({"choice": "yes"}, "choice: a list of texts, got 'yes'"),
        ({"choice": [1]}, "choice: a list of texts, got [1]"),
        ({"choice": {"a": 1}}, "choice: a list of texts, got {'a': 1}"),
        ({"stop": {"a": 1}}, "stop: a text or a list of texts, got {'a': 1}"),
        ({"temperature": True}, "temperature: a number, got True"),
        ({"choice": ["a"], "regex": "b"}, "choice: unset beside regex, got ['a']"),
        ({"json_object": True, "json_schema": "{}"}, "json_object: unset beside json_schema, got True"),
        ({"user": "\ud800"}, "user: a text that UTF-8 can encode, got '\\ud800'"),
        ({"model": 3}, "model: a text, got 3"),
        (
            {"token_ids": [1, 2]},
            "token_ids: True or False; as input, token ids are the prompt: generate([1, 2]), got [1, 2]",
        ),
        (
            {"prompt": None, "token_ids": [1, 2]},
            "token_ids: True or False; as input, token ids are the prompt: generate([1, 2]), got [1, 2]",
        ),
        ({"timeout": "3"}, "timeout: a finite number of seconds, or None for no deadline, got '3'"),
        ({"timeout": float("inf")}, "timeout: a finite number of seconds, or None for no deadline, got inf"),
        ({"timeout": float("nan")}, "timeout: a finite number of seconds, or None for no deadline, got nan"),
        ({"prompt": "\ud800"}, "prompt: a text that UTF-8 can encode, got '\\ud800'"),
        ({"prompt": b"x"}, f"{PROMPT}, got b'x'"),
        ({"prompt": 5}, f"{PROMPT}, got 5"),
        ({"prompt": {"role": "user"}}, f"{PROMPT}, got {{'role': 'user'}}"),
        ({"prompt": ["a", "b"]}, f"{PROMPT}; token ids are ints from 0, got ['a', 'b']"),
        ({"prompt": [1, -1]}, f"{PROMPT}; token ids are ints from 0, got [1, -1]"),
        ({"prompt": [{"role": 3}]}, "messages[0].role: a text, got 3"),
        (
            {"prompt": [{"nome": "x"}]},
            "messages[0]: role, content, name, tool_calls, tool_call_id, reasoning, nothing else, got {'nome': 'x'}",
        ),
        ({"prompt": None, "messages": "x"}, 'messages: a list of {"role": ..., "content": ...}, got \'x\''),
        ({"prompt": None, "messages": []}, 'messages: a list of {"role": ..., "content": ...}, got []'),
        (
            {"prompt": [{"role": "a"}, 3]},
            "messages[1]: role, content, name, tool_calls, tool_call_id, reasoning, nothing else, got 3",
        ),
    ],
    ids=str,
)
def test_an_invalid_argument_error_names_the_expected_values(client: Client, arguments: Any, message: str) -> None:
    with pytest.raises(decant.InvalidArgument) as caught:
        client.generate(**{"prompt": "x", **arguments})
    assert str(caught.value) == message
    assert caught.value.field == message.partition(":")[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda client: client.tokenize(None), "text: a text or messages, got None"),
        (lambda client: client.tokenize(5), "text: a text or messages, got 5"),
        (lambda client: client.tokenize([1, 2]), "text: a text or messages, got [1, 2]"),
        (lambda client: client.tokenize("\ud800"), "text: a text that UTF-8 can encode, got '\\ud800'"),
        (lambda client: client.tokenize("x", model=3), "model: a text, got 3"),
        (lambda client: client.score(5, ["x"]), "prompt: a text, or token ids, which are ints from 0, got 5"),
        (lambda client: client.score("x", "y"), "continuations: a list of texts, or of lists of token ids, got 'y'"),
        (
            lambda client: client.score("x", ["y", None]),
            "continuations[1]: a text, or token ids, which are ints from 0, got None",
        ),
        (lambda client: client.score("x", ["y"], logprobs=-1), "logprobs: an int from 0 to 4294967295, got -1"),
        (lambda client: client.embed("x", pooling="max"), "pooling: 'last' or 'mean', got 'max'"),
        (lambda client: client.embed([b"x"]), "inputs[0]: a text, or token ids, which are ints from 0, got b'x'"),
        (lambda client: client.detokenize("ab"), "token_ids: a list of ints from 0, got 'ab'"),
        (lambda client: client.detokenize(b"ab"), "token_ids: a list of ints from 0, got b'ab'"),
        (lambda client: client.detokenize(None), "token_ids: a list of ints from 0, got None"),
        (lambda client: client.detokenize([-1]), "token_ids: a list of ints from 0, got [-1]"),
        (lambda client: client.model(3), "model: a text, got 3"),
        (lambda client: client.cancel(3), "request_id: a text, got 3"),
        (lambda client: client.generation(3), "request_id: a text, got 3"),
        (lambda client: client.resume("r", after_seq="x"), "after_seq: an int, got 'x'"),
        (lambda client: client.generate({1, 2}), f"{PROMPT}, got {{1, 2}}"),
    ],
)
async def test_every_call_refuses_an_argument_of_a_wrong_type_by_name(
    client: Client, address: str, call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(decant.InvalidArgument) as caught:
        call(client)
    assert str(caught.value) == message
    async with AsyncClient(address) as other:
        with pytest.raises(decant.InvalidArgument) as caught:
            await call(other)
    assert str(caught.value) == message


@pytest.mark.parametrize("address", [None, 5, [None], ["localhost", 5]])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_address_that_is_not_a_text_is_refused(kind: Any, address: Any) -> None:
    with pytest.raises(ValueError, match="address: 'host:port', or several with commas between them, got"):
        kind(address)


def test_every_field_of_a_request_is_an_option_of_the_same_name() -> None:
    groups = {"sampling", "stopping", "response", "guided", "cache", "stream"}
    inputs = {"prompt", "token_ids", "messages"}
    fields = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} - groups - inputs
    for group in groups:
        kind: Any = pb.GenerateRequest.DESCRIPTOR.fields_by_name[group].message_type
        fields |= {field.name for field in kind.fields}
    assert (
        fields
        | {
            *("add_generation_prompt", "continue_final_message", "reasoning"),
            *("tools", "tool_choice", "parallel_tool_calls"),
        }
        == Options.__annotations__.keys()
    )


def test_help_shows_every_option_with_its_meaning() -> None:
    assert OPTION_HELP.keys() == Options.__annotations__.keys()
    for method in (Client.generate, Client.stream, AsyncClient.generate, AsyncClient.stream):
        shown = pydoc.plain(pydoc.render_doc(method))
        for name, text in OPTION_HELP.items():
            assert f"{name}: " in shown, name
            assert text in shown, name
        assert inspect.signature(method).parameters["max_tokens"].annotation == int | None


def test_options_reach_their_fields() -> None:
    made = request(
        [{"role": "user", "content": "hi"}],
        {
            "temperature": 0.5,
            "logit_bias": {3: -1.0},
            "stop": "\n",
            "stop_token_ids": [4],
            "logprobs": 0,
            "seed": None,
            "choice": ["a", "b"],
            "cache_salt": "s",
            "priority": 3,
            "add_generation_prompt": False,
        },
    )
    expected = pb.GenerateRequest(
        messages=pb.Messages(messages=[pb.Message(role="user", content="hi")], add_generation_prompt=False),
        sampling=pb.SamplingParams(temperature=0.5, logit_bias={3: -1.0}),
        stopping=pb.StoppingParams(stop=["\n"], stop_token_ids=[4]),
        response=pb.ResponseOptions(logprobs=0),
        guided=pb.GuidedDecoding(choice=pb.Choices(choices=["a", "b"])),
        cache=pb.CacheOptions(cache_salt="s"),
        priority=3,
    )
    assert made == expected
    assert request([1, 2], {}).token_ids.ids == [1, 2]
    schema = request("x", {"json_schema": {"type": "object"}}).guided.json_schema
    assert schema == '{"type": "object"}'


HELLO = [{"role": "user", "content": "hello"}]


def test_tools_and_calls_are_taken_in_the_form_of_other_clients() -> None:
    function = {"name": "now", "description": "Time.", "parameters": {"type": "object", "title": "é"}}
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, {"name": "now", "arguments": {"x": "é"}}]},
        {"role": "tool", "tool_call_id": "c1", "name": "now", "content": "noon"},
    ]
    expected = pb.Messages(
        messages=[
            pb.Message(role="user", parts=[pb.ContentPart(text="a")]),
            pb.Message(
                role="assistant",
                tool_calls=[
                    pb.ToolCall(id="c1", name="now", arguments="{}"),
                    pb.ToolCall(name="now", arguments='{"x": "é"}'),
                ],
            ),
            pb.Message(role="tool", tool_call_id="c1", name="now", content="noon"),
        ],
        tools=[pb.Tool(name="now", description="Time.", parameters='{"type": "object", "title": "é"}')],
        tool_choice=pb.ToolChoice(mode=pb.ToolChoice.MODE_AUTO),
    )
    for tools in ([function], [{"type": "function", "function": function}]):
        assert request(messages, {"tools": tools, "tool_choice": "auto"}).messages == expected
    named = request(HELLO, {"tools": [function], "tool_choice": {"type": "function", "function": {"name": "now"}}})
    assert named.messages.tool_choice.name == "now"
    assert request(HELLO, {"tools": [function], "tool_choice": "now"}) == named
    for mode in ("auto", "none", "required"):
        forced = request(HELLO, {"tool_choice": {"function": {"name": mode}}}).messages.tool_choice
        assert forced == pb.ToolChoice(name=mode), "the name of a tool may be that of a mode"
    strict = request(HELLO, {"tools": [{**function, "strict": True}], "parallel_tool_calls": False}).messages
    assert strict.tools[0].strict
    assert strict.HasField("parallel_tool_calls")


def test_reasoning_and_a_continued_message_are_options_of_messages() -> None:
    made = request(HELLO, {"reasoning": False, "continue_final_message": True, "max_reasoning_tokens": 0})
    assert made.messages.HasField("reasoning")
    assert made.messages.continue_final_message
    assert made.stopping.HasField("max_reasoning_tokens")


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x", {"max_tokens": -1}, "max_tokens"),
        ("x", {"temperature": "hot"}, "temperature"),
        ("x", {"stop_token_ids": ["a"]}, "stop_token_ids"),
        ("x", {"add_generation_prompt": True}, "add_generation_prompt"),
        ("x", {"on_disconnect": "stay"}, "on_disconnect"),
        ([-1], {}, "prompt"),
        ([{"role": "user", "nome": "x"}], {}, "messages[0]"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "messages[0].content[0]"),
        ([{"role": "user", "tool_calls": "x"}], {}, "messages[0].tool_calls"),
        ([{"role": "user", "tool_calls": [{"id": "a", "kind": "x"}]}], {}, "messages[0].tool_calls[0]"),
        ([{"role": "user", "tool_calls": [{"name": 3}]}], {}, "messages[0].tool_calls[0].name"),
        (HELLO, {"tools": {"name": "x"}}, "tools"),
        (HELLO, {"tools": [3]}, "tools[0]"),
        (HELLO, {"tools": [{"name": 3}]}, "tools[0].name"),
        (HELLO, {"tools": [{"name": "x", "parameters": 3}]}, "tools[0].parameters"),
        (HELLO, {"tools": [{"name": "x", "parameters": {"maximum": float("inf")}}]}, "tools[0].parameters"),
        (HELLO, {"tools": [{"type": "custom", "function": {"name": "x"}}]}, "tools[0]"),
        (HELLO, {"tools": [{"type": "custom", "name": "x"}]}, "tools[0]"),
        (HELLO, {"tools": [{"function": {"name": "x"}, "strict": True}]}, "tools[0]"),
        (HELLO, {"tool_choice": 3}, "tool_choice"),
        (HELLO, {"tool_choice": {"type": "bogus", "function": {"name": "x"}}}, "tool_choice"),
        ("x", {"json_schema": {"maximum": float("inf")}}, "json_schema"),
        ("x", {"tools": []}, "tools"),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_refused_by_name(prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(decant.InvalidArgument) as caught:
        request(prompt, options)
    assert caught.value.field == field


def test_an_unset_guide_leaves_the_other_one() -> None:
    assert request("x", {"regex": "a", "json_object": False, "choice": None}).guided == pb.GuidedDecoding(regex="a")


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        request("x", {"max_token": 3})  # type: ignore[typeddict-unknown-key]
