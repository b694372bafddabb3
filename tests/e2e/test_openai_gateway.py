"""OpenAI's and Anthropic's own clients -> `decant gateway` and smg -> a deployment: the tables in
docs/guides/gateways.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shlex
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI

import decant
from decant import models
from tests.e2e.checkpoints import small_with
from tests.e2e.deployment import PATIENCE_S, SMALL_KV, Deployment, Process, Worker, deployment
from tests.engine import peft_adapters
from tests.ports import reserved_port

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "gateways.md"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{# calls: <tool_call> arguments </tool_call> #}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
)
MODEL, ADAPTER = "chat", "tuned"
SMG, OWN = "smg", "decant"
KEY, LIMITED = "the-key-of-acme", "the-key-of-umbrella"
TENANTS = f"""
[tenants.acme]
tokens = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]

[tenants.umbrella]
tokens = ["{hashlib.sha256(LIMITED.encode()).hexdigest()}"]
max_in_flight = 1
"""
PROMPT = "def total(values):\n    result = 0\n"
MESSAGES: Any = [{"role": "user", "content": "sum of a list"}]
LONG = 600
AT_ONCE = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / MODEL
    return small_with(folder, "tokenizer_config.json", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    adapter = peft_adapters.for_model(tmp_path_factory.mktemp("adapters") / ADAPTER, models.path(), seed=1)
    often_waiting = ("--stream-keepalive-seconds", "0.02")  # the gateway skips its responses that are no chunk
    # A run of the router that is killed stays for the lease; it has to end before the drain of its worker does.
    worker = (*SMALL_KV, "--adapters", f"{ADAPTER}={adapter}", "--lease-ms", "30000")
    with deployment(decode=3, model=str(model), router=often_waiting, worker=worker) as made:
        yield made


@pytest.fixture(scope="module")
def url_of_smg(running: Deployment) -> Iterator[str]:
    arguments = ("--host", "127.0.0.1", "--port", "0", "--drain-seconds", "10", "--routers", running.address)
    with Process("command.up.openai_gateway", *arguments, common=()) as gateway:
        gateway.until("readiness", state="ready")
        yield f"http://{gateway.until('serving')['address']}"


@pytest.fixture(scope="module")
def routers_with_tenants(
    running: Deployment, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Process]]:
    """Two more routers of the deployment, which need keys."""
    file: Path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(TENANTS)
    arguments = ("--redis-url", running.redis.url, "--port", "0", "--models", str(model), "--credentials", str(file))
    with ExitStack() as stack:
        routers = [
            stack.enter_context(Process("router", *arguments, "--handoff-min-tokens", "0", "--id", f"keys-{number}"))
            for number in range(2)
        ]
        for router in routers:
            router.until("readiness", state="ready")
        yield routers


@pytest.fixture(scope="module")
def own_url(routers_with_tenants: list[Process]) -> Iterator[str]:
    addresses = ",".join(router.until("serving")["address"] for router in routers_with_tenants)
    with Process("gateway", "--port", "0", "--address", addresses, "--drain-seconds", "10") as gateway:
        gateway.until("readiness", state="ready")
        yield f"http://{gateway.until('serving')['address']}"


@pytest.fixture(params=[OWN, SMG])
def url(request: pytest.FixtureRequest) -> str:
    """Each test of it runs through both gateways."""
    url: str = request.getfixturevalue({OWN: "own_url", SMG: "url_of_smg"}[request.param])
    return url


def client_of(url: str, key: str = KEY) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


@pytest.fixture
def client(url: str) -> OpenAI:
    return client_of(url)


@pytest.fixture
def own(own_url: str) -> OpenAI:
    return client_of(own_url)


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "temperature": 0, **fields})


def complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, "temperature": 0, **fields})


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


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


def drawn_greedily(client: OpenAI) -> str:
    text: str = complete(client, max_tokens=24).choices[0].text
    return text


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


SCHEMA: Any = {
    "type": "object",
    "properties": {"size": {"type": "integer", "maximum": 99}, "kind": {"enum": ["list", "dict"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}


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


# What Decant's own gateway does beside it


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
    endless: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APIStatusError) as late:
        complete(own, **endless, extra_headers={"X-Request-Timeout": "0.001"})
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
