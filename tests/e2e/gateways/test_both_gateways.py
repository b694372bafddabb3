"""OpenAI's and Anthropic's own clients -> `decant gateway` and smg -> a deployment: the tables in
docs/guides/gateways.md.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI

import decant
from tests.e2e.deployment import PATIENCE_S, Deployment, Worker
from tests.e2e.gateways.openai_calls import (
    KEY,
    LONG,
    MESSAGES,
    MODEL,
    PROMPT,
    SCHEMA,
    chat,
    client_of,
    complete,
    drawn_greedily,
    text_of,
)
from tests.ports import reserved_port

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "gateways.md"
AT_ONCE = 64


def test_an_answer_in_a_chat_is_that_of_decants_own_api(client: OpenAI, running: Deployment) -> None:
    answer = chat(client, max_tokens=24)
    with decant.Client(running.address) as own:
        same = own.generate(messages=MESSAGES, max_tokens=24, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (same.text, "length")
    assert answer.usage.prompt_tokens == same.usage.prompt_tokens
    assert answer.usage.completion_tokens == same.usage.completion_tokens == 24


def test_a_stream_has_the_text_of_the_whole_answer_and_its_usage(client: OpenAI) -> None:
    whole = complete(client, max_tokens=24)
    chunks = list(complete(client, max_tokens=24, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert len(chunks) > 20, "tokens arrive one by one"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chat(client, max_tokens=24, stream=True)]
    assert "".join(deltas) == chat(client, max_tokens=24).choices[0].message.content


def test_a_stop_string_ends_the_answer_before_it(client: OpenAI) -> None:
    endless = drawn_greedily(client)
    stop = endless[12:16]
    (choice,) = complete(client, max_tokens=24, stop=[stop]).choices
    assert (choice.finish_reason, choice.text) == ("stop", endless[: endless.index(stop)])
    streamed = list(complete(client, max_tokens=24, stop=[stop], stream=True))
    assert text_of(streamed) == choice.text
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_sampling_parameters_reach_the_engine(client: OpenAI) -> None:
    drawn = [complete(client, max_tokens=24, temperature=1.0, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert complete(client, max_tokens=24, temperature=1.0, top_p=0.0001).choices[0].text == drawn_greedily(client)
    assert complete(client, max_tokens=24, presence_penalty=2.0).choices[0].text != drawn_greedily(client)


def test_several_outputs_are_choices(client: OpenAI) -> None:
    answer = complete(client, n=2, max_tokens=16, temperature=1.0, seed=1)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert texts[0] != texts[1]
    streamed = ["", ""]
    for chunk in complete(client, n=2, max_tokens=16, temperature=1.0, seed=1, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    assert answer.usage.completion_tokens == 32


def test_a_schema_shapes_the_answer_and_a_required_tool_is_called(client: OpenAI) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    (choice,) = chat(client, max_tokens=200, response_format=format).choices
    answer = json.loads(choice.message.content)
    assert (choice.finish_reason, sorted(answer)) == ("stop", ["kind", "size"])
    tool = {"type": "function", "function": {"name": "measure", "parameters": SCHEMA, "strict": True}}
    (choice,) = chat(client, max_tokens=300, tools=[tool], tool_choice="required").choices
    (call, *_) = choice.message.tool_calls
    assert call.function.name == "measure"
    assert sorted(json.loads(call.function.arguments)) == ["kind", "size"]


def test_a_chat_has_logprobs(client: OpenAI) -> None:
    (choice,) = chat(client, max_tokens=3, logprobs=True, top_logprobs=2).choices
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2, 2]
    chunks = chat(client, max_tokens=3, logprobs=True, top_logprobs=2, stream=True)
    streamed = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.logprob for token in streamed] == [token.logprob for token in choice.logprobs.content]


def test_what_smg_loses_is_what_the_page_says(url_of_smg: str) -> None:
    client = client_of(url_of_smg)
    assert complete(client, max_tokens=3, logprobs=2).choices[0].logprobs is None
    biased = complete(client, max_tokens=24, logit_bias={"500": 100}).choices[0].text
    assert biased == drawn_greedily(client), "logit_bias is dropped"
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt=[308, 882], max_tokens=3)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"model": "other"}, openai.NotFoundError, "other"),
        ({"prompt": "word " * 3000}, openai.BadRequestError, "2048"),
        ({"stop": ["x" * 300]}, openai.BadRequestError, "stop[0]: at most 256 bytes"),
    ],
)
def test_an_error_has_openais_class_and_says_what_is_wrong(
    client: OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], text: str
) -> None:
    with pytest.raises(error) as refused:
        complete(client, **fields)
    assert text in str(refused.value)


def test_an_answer_that_its_client_leaves_ends_on_the_workers(client: OpenAI, running: Deployment) -> None:
    stream = complete(client, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert owner(running) is not None
    stream.close()
    running.settled()


@contextmanager
def launched(command: str, router: str) -> Iterator[str]:
    """Run the page's command of smg in front of this router; yield its URL when it answers."""
    with reserved_port() as port, reserved_port() as metrics_port:
        changes = {"0.0.0.0": "127.0.0.1", "8000": str(port), "grpc://router-1:50051": f"grpc://{router}"}
        words = [changes.get(word, word) for word in shlex.split(command) if word != "grpc://router-2:50051"]
        program = Path(sysconfig.get_path("scripts"), words[0])
        more = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "error")
        with subprocess.Popen([program, *words[1:], *more]) as process:
            try:
                url, ends = f"http://127.0.0.1:{port}/v1", time.monotonic() + PATIENCE_S
                with OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=PATIENCE_S) as client:
                    while not answers(client):
                        assert process.poll() is None, "smg ended"
                        assert time.monotonic() < ends, "smg does not answer"
                        time.sleep(0.2)
                yield url
            finally:
                process.terminate()
                process.wait(PATIENCE_S)


def answers(client: OpenAI) -> bool:
    try:
        return bool(chat(client, max_tokens=1).choices)
    except (openai.APIConnectionError, openai.APIStatusError):
        return False


def test_the_command_and_the_program_of_the_page(running: Deployment, own_url: str) -> None:
    page = PAGE.read_text()
    (command,) = re.findall(r"```\n(smg launch .+?)```", page, re.DOTALL)
    (program,) = re.findall(r"```python\n(from openai .+?)```", page, re.DOTALL)
    with launched(command.replace("\\\n", " "), running.address) as url:
        by_smg = printed_by(program, url)
    assert by_smg == printed_by(program, f"{own_url}/v1") != ""


def printed_by(program: str, url: str) -> str:
    changes = {"http://127.0.0.1:8000/v1": url, "Qwen/Qwen2.5-0.5B-Instruct": MODEL, "unused": KEY}
    for text, instead in changes.items():
        assert text in program
        program = program.replace(text, instead)
    with redirect_stdout(StringIO()) as printed:
        exec(program, {"__name__": "__main__"})
    return printed.getvalue().strip()


async def test_many_streams_at_once_are_all_complete(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE_S) as client:

        async def ask(number: int) -> str:
            prompt = f"{PROMPT}    value = {number % 8}\n"
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, temperature=0, max_tokens=16, stream=True, extra_body={"ignore_eos": True}
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(ask(number) for number in range(AT_ONCE)))
    assert [texts.count(text) % (AT_ONCE // 8) for text in texts] == [0] * AT_ONCE, "equal prompts have equal answers"


def test_anthropics_client_gets_messages(url_of_smg: str) -> None:
    client = client_of(url_of_smg)
    anthropic = Anthropic(base_url=url_of_smg, api_key="unused", max_retries=0, timeout=PATIENCE_S)
    expected = chat(client, max_tokens=16).choices[0].message.content
    message = anthropic.messages.create(model=MODEL, max_tokens=16, messages=MESSAGES)
    assert [block.text for block in message.content if block.type == "text"] == [expected]
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 16)
    with anthropic.messages.stream(model=MODEL, max_tokens=16, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == expected


def test_responses_api_answers(url_of_smg: str) -> None:
    client = client_of(url_of_smg)
    response = client.responses.create(model=MODEL, input="sum of a list", max_output_tokens=16, temperature=0)
    assert response.output_text == chat(client, max_tokens=16).choices[0].message.content


def owner(running: Deployment) -> Worker | None:
    return next((worker for worker in running.workers[1:] if worker.audit().owners), None)


def test_the_client_notices_nothing_of_a_decode_worker_that_is_killed(client: OpenAI, running: Deployment) -> None:
    fields: dict[str, Any] = {"max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    undisturbed = complete(client, **fields).choices[0].text
    stream = complete(client, **fields, stream=True)
    chunks = [next(stream) for _ in range(10)]
    killed = owner(running)
    ends = time.monotonic() + PATIENCE_S
    while killed is None and time.monotonic() < ends:
        killed = owner(running)
    assert killed is not None
    killed.process.kill()
    running.workers.remove(killed)
    chunks += list(stream)
    assert text_of(chunks) == undisturbed
    assert chunks[-1].choices[0].finish_reason == "length"
    running.settled()


def test_an_embedding_of_one_text_is_that_of_decants_own_api(client: OpenAI, running: Deployment) -> None:
    made = client.embeddings.create(model=MODEL, input=PROMPT)
    with decant.Client(running.address) as own:
        (same,) = own.embed(PROMPT).embeddings
    assert made.data[0].embedding == pytest.approx(list(same.values), abs=1e-6)
    assert made.usage.prompt_tokens == same.prompt_tokens


def test_several_inputs_have_an_embedding_each_but_through_smg(own: OpenAI, url_of_smg: str) -> None:
    inputs = [PROMPT, "import os"]
    assert len(own.embeddings.create(model=MODEL, input=inputs).data) == 2
    joined = client_of(url_of_smg).embeddings.create(model=MODEL, input=inputs)
    assert len(joined.data) == 1, "smg returns one for all: then the table in the guide is wrong"
