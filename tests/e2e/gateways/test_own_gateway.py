"""What Decant's own gateway does beside what both gateways do."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

import decant
from tests.e2e.deployment import Deployment, Process
from tests.e2e.gateways.openai_calls import (
    ADAPTER,
    LIMITED,
    LONG,
    MESSAGES,
    MODEL,
    PROMPT,
    SCHEMA,
    chat,
    client_of,
    complete,
    text_of,
)

pytestmark = pytest.mark.slow


def test_a_completion_has_logprobs_bias_token_ids_and_the_text_of_decants_own_api(
    own: OpenAI, running: Deployment
) -> None:
    with decant.Client(running.address) as direct:
        same = direct.generate(PROMPT, max_tokens=8, temperature=0, logprobs=2)
        ids = list(direct.tokenize(PROMPT).token_ids)
    (choice,) = complete(own, max_tokens=8, logprobs=2).choices
    assert choice.text == same.text
    assert choice.logprobs.token_logprobs == [token.logprob for token in same.logprobs]
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * 8
    streamed = complete(own, max_tokens=8, logprobs=2, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [one for part in parts for one in part.token_logprobs] == choice.logprobs.token_logprobs
    by_ids = complete(own, prompt=[ids, ids], max_tokens=8).choices
    assert [one.text for one in by_ids] == [same.text] * 2
    (biased,) = complete(own, max_tokens=3, logit_bias={"500": 100}, logprobs=0).choices
    assert len({*biased.logprobs.tokens}) == 1
    echoed = complete(own, max_tokens=8, echo=True).choices[0].text
    assert echoed == PROMPT + same.text
    (accented,) = complete(own, prompt="def é(a", max_tokens=4, echo=True, logprobs=0).choices
    begins = zip(accented.logprobs.tokens, accented.logprobs.text_offset, strict=True)
    in_text = [(token, begin) for token, begin in begins if not token.startswith("<|") and "\ufffd" not in token]
    assert in_text[0] == ("def", 0)
    assert all(accented.text.startswith(token, begin) for token, begin in in_text)


def test_an_adapter_is_a_model(own: OpenAI, running: Deployment) -> None:
    listed = {model.id: (model.model_extra or {})["parent"] for model in own.models.list()}
    assert listed == {MODEL: None, ADAPTER: MODEL}
    with decant.Client(running.address) as direct:
        same = direct.generate(messages=MESSAGES, max_tokens=16, temperature=0, lora_name=ADAPTER)
    answer = chat(own, model=ADAPTER, max_tokens=16)
    assert (answer.model, answer.choices[0].message.content) == (ADAPTER, same.text)
    assert same.text != chat(own, max_tokens=16).choices[0].message.content


def test_a_call_of_a_tool_streams_as_one_that_is_whole(own: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "measure", "parameters": SCHEMA, "strict": True}}
    fields: dict[str, Any] = {"tools": [tool], "max_tokens": 300, "parallel_tool_calls": False}
    fields["tool_choice"] = {"type": "function", "function": {"name": "measure"}}
    (choice,) = chat(own, **fields).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    *chunks, last = chat(own, **fields, stream=True)
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    assert (pieces[0].function.name, last.choices[0].finish_reason) == ("measure", "tool_calls")


def test_keys_are_those_of_tenants_whose_quotas_hold(own_url: str, own: OpenAI, running: Deployment) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown:
        chat(client_of(own_url, "guessed"))
    assert unknown.value.code == "invalid_api_key"
    limited = client_of(own_url, LIMITED)
    stream = complete(limited, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as refused:
        complete(limited, max_tokens=3)
    assert "in_flight: at most 1, got 2" in str(refused.value)
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert complete(own, max_tokens=3).choices, "the other tenant has its own"
    stream.close()
    running.settled()


def test_a_deadline_ends_a_request_with_an_error(own: OpenAI) -> None:
    """One so short that no router can answer first: a router that knows its pace refuses what would miss a deadline."""
    endless: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APIStatusError) as late:
        complete(own, **endless, extra_headers={"X-Request-Timeout": "0.000001"})
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")


def test_the_client_notices_nothing_of_a_router_that_is_killed(
    own: OpenAI, routers_with_tenants: list[Process], running: Deployment
) -> None:
    fields: dict[str, Any] = {"max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    undisturbed = complete(own, **fields).choices[0].text
    streams = [complete(own, **fields, stream=True) for _ in routers_with_tenants]  # one through each
    texts = ["".join(next(stream).choices[0].text for _ in range(5)) for stream in streams]
    routers_with_tenants[0].kill()
    assert [text + text_of(stream) for text, stream in zip(texts, streams, strict=True)] == [undisturbed] * 2
    running.settled()
