"""Both clients against a scripted server: requests, results, errors, and abandoned streams."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pydoc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import decant
from decant import AsyncClient, CancelStatus, Client, FinishReason, GenerationState
from decant.client.option_help import OPTION_HELP
from decant.client.options import Options, request
from decant.protos import inference_pb2 as pb
from decant.runtime.error_details import Reason, ResumePoint
from tests.decant.scripted import PATIENCE_S, Script, for_ever, never, serving
from tests.runtime.certificates import Certificates
from tests.runtime.harness import scene


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client


def test_a_stream_is_deltas_and_then_the_account_of_it(client: Client) -> None:
    with client.stream("x", token_ids=True) as stream:
        assert [delta.text for delta in stream] == ["a", "b", "c"]
    assert (stream.text, stream.seq, stream.is_complete) == ("abc", 3, True)
    assert stream.resumed_at == []
    assert stream.started is not None
    assert stream.started.seed == 7
    assert stream.finished == decant.Finished(FinishReason.STOP, 2)
    assert stream.usage == decant.Usage(3, 3, 6)
    assert stream.receipt is not None
    assert (stream.receipt.ttft_ms, stream.receipt.handoff_ms) == (5.0, None)
    (output,) = stream.outputs
    assert output.token_ids == (97, 98, 99)


def test_a_whole_answer(client: Client) -> None:
    answer = client.generate("x")
    assert (answer.text, answer.model, answer.seed) == ("abc", "m", 7)
    assert answer.finished == decant.Finished(FinishReason.STOP, 2)
    assert answer.usage.total_tokens == 6
    assert answer.receipt.decode_worker == "d"


def test_a_stream_that_was_read_to_its_end_cancels_nothing(client: Client, script: Script) -> None:
    with client.stream("x", request_id="r") as stream:
        list(stream)
    client.generate("x", request_id="s")
    client.server_info()
    assert script.cancelled == []


def leave_by_break(client: Client) -> None:
    for _ in client.stream("x", request_id="r"):
        break


def leave_by_an_exception(client: Client) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in client.stream("x", request_id="r"):
            raise ZeroDivisionError


def leave_by_the_end_of_with(client: Client) -> None:
    with client.stream("x", request_id="r") as stream:
        assert next(iter(stream)).text == "a"


def leave_by_closing(client: Client) -> None:
    stream = client.stream("x", request_id="r")
    next(reading := iter(stream))
    stream.close()
    stream.close()
    with pytest.raises(decant.Cancelled):
        list(reading)


@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_an_exception, leave_by_the_end_of_with, leave_by_closing],
    ids=lambda f: f.__name__,
)
def test_a_stream_that_is_left_is_cancelled_by_name_and_its_call_ends(
    client: Client, script: Script, leave: Any
) -> None:
    script.answering = for_ever
    leave(client)
    assert script.was_cancelled.wait(PATIENCE_S)
    assert script.call_ended.wait(PATIENCE_S)
    assert script.cancelled == ["r"]


def test_every_request_has_an_id_of_its_own_by_which_it_is_cancelled(client: Client, script: Script) -> None:
    script.answering = for_ever
    with client.stream("x") as stream:
        next(iter(stream))
    assert script.was_cancelled.wait(PATIENCE_S)
    assert script.cancelled == [stream.request_id]
    script.answering = None
    client.generate("x")
    ids = {request.request_id for request in script.asked}
    assert len(ids) == 2
    assert all(uuid.UUID(id) for id in ids)


def test_a_detached_stream_that_is_left_is_not_cancelled(client: Client, script: Script) -> None:
    script.answering = for_ever
    with client.stream("x", on_disconnect="detach") as stream:
        next(iter(stream))
    assert script.call_ended.wait(PATIENCE_S)
    assert script.cancelled == []
    assert script.asked[0].stream.on_disconnect == pb.StreamOptions.ON_DISCONNECT_DETACH


def test_a_stream_that_is_left_before_anything_came_closes_its_call(client: Client, script: Script) -> None:
    script.answering = never
    with client.stream("x"):
        pass
    client.server_info()
    if script.asked:  # otherwise the stream closed before it arrived
        assert script.call_ended.wait(PATIENCE_S)


ERRORS = [
    decant.InvalidArgument("sampling.top_p", "above 0, to 1", 2.0),
    decant.Unimplemented("SamplingParams.n", 2),
    decant.NotFound("model", "nobody"),
    decant.AlreadyExists("r"),
    decant.QueueFull(4, retry_after=0.01),
    decant.Aborted(Reason.WORKERS_LOST, "lost", resume=ResumePoint(0, 5)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_refusal_arrives_as_the_error_that_it_is(address: str, script: Script, error: Any) -> None:
    script.refusal = error
    raised = []
    with Client(address) as client:
        for ask in (client.generate, lambda prompt: list(client.stream(prompt))):
            with pytest.raises(type(error)) as caught:
                ask("x")
            raised.append(caught.value)
    async with AsyncClient(address) as awaiting:
        with pytest.raises(type(error)) as caught:
            await awaiting.generate("x")
        raised.append(caught.value)
        with pytest.raises(type(error)) as caught:
            async for _ in awaiting.stream("x"):
                pass
        raised.append(caught.value)
    assert all(one.fault == error.fault for one in raised)


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(decant.Unavailable):
        client.generate("x", timeout=PATIENCE_S)


def test_the_timeout_is_the_requests_deadline(client: Client, script: Script) -> None:
    script.answering = never
    with pytest.raises(decant.DeadlineExceeded):
        client.generate("x", timeout=0.3)
    client.stream("x", timeout=40).close()
    script.answering = None
    list(client.stream("x", timeout=40))
    assert script.time_left is not None
    assert 0 < script.time_left < 45


async def test_a_deadline_in_mid_stream_has_the_documented_reason(address: str, script: Script) -> None:
    script.answering = for_ever
    errors = []
    with Client(address) as client:
        for ask in (lambda: list(client.stream("x", timeout=0.5)), lambda: client.generate("x", timeout=0.5)):
            with pytest.raises(decant.DeadlineExceeded) as caught:
                await asyncio.to_thread(ask)
            errors.append(caught.value)
    async with AsyncClient(address) as awaiting:
        with pytest.raises(decant.DeadlineExceeded) as caught:
            async for _ in awaiting.stream("x", timeout=0.5):
                pass
        errors.append(caught.value)
        with pytest.raises(decant.DeadlineExceeded) as caught:
            await awaiting.generate("x", timeout=0.5)
        errors.append(caught.value)
    assert {error.reason for error in errors} == {Reason.DEADLINE_EXCEEDED}
    assert {str(error) for error in errors} == {"the deadline of 0.5 s has passed"}


async def test_messages_may_be_a_keyword(address: str, script: Script) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with Client(address) as client:
        client.generate(messages=messages)
        list(client.stream(messages=messages, max_tokens=3))
    async with AsyncClient(address) as awaiting:
        await awaiting.generate(messages=messages)
        assert [delta.text async for delta in awaiting.stream(messages=messages)] == ["a", "b", "c"]
    assert [asked.messages.messages[0].content for asked in script.asked] == ["hi"] * 4


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
def test_a_call_that_is_no_request_is_a_type_error(client: Client, arguments: Any, message: str) -> None:
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
        ({"prompt": [{"name": "x"}]}, "messages[0]: role and content, and nothing else, got {'name': 'x'}"),
        ({"prompt": None, "messages": "x"}, 'messages: a list of {"role": ..., "content": ...}, got \'x\''),
        ({"prompt": None, "messages": []}, 'messages: a list of {"role": ..., "content": ...}, got []'),
        ({"prompt": [{"role": "a"}, 3]}, "messages[1]: role and content, and nothing else, got 3"),
    ],
    ids=str,
)
def test_a_refusal_before_sending_says_what_is_expected(client: Client, arguments: Any, message: str) -> None:
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
async def test_every_call_refuses_an_argument_of_another_type_by_name(
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
def test_an_address_that_is_no_text_is_refused(kind: Any, address: Any) -> None:
    with pytest.raises(ValueError, match="address: 'host:port', or several with commas between them, got"):
        kind(address)


def test_the_other_calls(client: Client) -> None:
    assert list(client.tokenize("ab").token_ids) == [97, 98]
    assert list(client.tokenize([{"role": "user", "content": "hi"}]).tokens) == ["h", "i"]
    assert client.detokenize([97, 98]) == "ab"
    assert [model.id for model in client.models()] == ["m"]
    assert client.model("other").id == "other"
    assert client.server_info().router_id == "r"
    assert client.cancel("r") is CancelStatus.CANCELLED


def test_where_a_request_stands(client: Client) -> None:
    client.generate("x", request_id="r")
    found = client.generation("r")
    assert (found.state, found.state.is_end, found.last_seq) == (GenerationState.FAILED, True, 2)
    assert (found.text, found.answer.token_ids) == ("ab", (97, 98))
    assert isinstance(found.error, decant.DeadlineExceeded)
    assert found.expire_time is not None
    assert (found.expire_time - found.create_time).total_seconds() == 4_000
    assert [(one.state.value, one.attempt) for one in found.transitions] == [("queued", 1), ("failed", 1)]
    with pytest.raises(decant.NotFound):
        client.generation("nobody's")


def test_a_request_is_come_back_to(client: Client, script: Script) -> None:
    client.generate("x", request_id="r")
    with client.resume("r", after_seq=1) as stream:
        assert [delta.text for delta in stream] == ["b", "c"]
    assert (stream.seq, stream.is_complete, stream.resumed_at) == (3, True, [])
    with client.resume("r") as stream:
        next(iter(stream))
    with pytest.raises(decant.NotFound):
        list(client.resume("nobody's"))
    assert script.cancelled == []


async def test_the_awaiting_client_does_the_same(address: str) -> None:
    async with AsyncClient(address) as client:
        async with client.stream("x") as stream:
            assert [delta.text async for delta in stream] == ["a", "b", "c"]
        assert stream.finished == decant.Finished(FinishReason.STOP, 2)
        assert (await client.generate("x")).text == "abc"
        assert list((await client.tokenize("ab")).token_ids) == [97, 98]
        assert await client.detokenize([97, 98]) == "ab"
        assert [model.id for model in await client.models()] == ["m"]
        assert (await client.model("other")).id == "other"
        assert (await client.server_info()).router_id == "r"
        assert await client.cancel("r") is CancelStatus.CANCELLED
        await client.generate("x", request_id="r")
        assert (await client.generation("r")).state is GenerationState.FAILED
        assert [delta.text async for delta in client.resume("r", after_seq=1)] == ["b", "c"]


async def leave_async_by_break(client: AsyncClient) -> None:
    async for _ in client.stream("x", request_id="r"):
        break


async def leave_async_by_the_end_of_with(client: AsyncClient) -> None:
    async with client.stream("x", request_id="r") as stream:
        async for _ in stream:
            break


async def leave_async_by_cancelling_the_reader(client: AsyncClient) -> None:
    arrived = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream("x", request_id="r"):
            arrived.set()

    reading = asyncio.create_task(read())
    await arrived.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def leave_async_by_a_timeout_around_generate(client: AsyncClient) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await client.generate("x", request_id="r")


@pytest.mark.parametrize(
    "leave",
    [
        leave_async_by_break,
        leave_async_by_the_end_of_with,
        leave_async_by_cancelling_the_reader,
        leave_async_by_a_timeout_around_generate,
    ],
    ids=lambda f: f.__name__,
)
async def test_what_is_left_is_cancelled_by_name_and_its_call_ends_async(
    address: str, script: Script, leave: Any
) -> None:
    script.answering = for_ever
    async with AsyncClient(address) as client:
        await leave(client)
        assert await asyncio.to_thread(script.was_cancelled.wait, PATIENCE_S)
        assert await asyncio.to_thread(script.call_ended.wait, PATIENCE_S)
    assert script.cancelled == ["r"]


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        functions = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(f).parameters) for name, f in functions if not name.startswith("__")}

    assert methods(Client) == methods(AsyncClient)


def test_every_field_of_a_request_is_an_option_by_its_own_name() -> None:
    groups = {"sampling", "stopping", "response", "guided", "cache", "stream"}
    inputs = {"prompt", "token_ids", "messages"}
    fields = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} - groups - inputs
    for group in groups:
        kind: Any = pb.GenerateRequest.DESCRIPTOR.fields_by_name[group].message_type
        fields |= {field.name for field in kind.fields}
    assert fields | {"add_generation_prompt"} == Options.__annotations__.keys()


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


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x", {"max_tokens": -1}, "max_tokens"),
        ("x", {"temperature": "hot"}, "temperature"),
        ("x", {"stop_token_ids": ["a"]}, "stop_token_ids"),
        ("x", {"add_generation_prompt": True}, "add_generation_prompt"),
        ("x", {"on_disconnect": "stay"}, "on_disconnect"),
        ([-1], {}, "prompt"),
        ([{"role": "user", "name": "x"}], {}, "messages[0]"),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_refused_by_name(prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(decant.InvalidArgument) as caught:
        request(prompt, options)
    assert caught.value.field == field


def test_an_option_that_there_is_none_of_is_told_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        request("x", {"max_token": 3})  # type: ignore[typeddict-unknown-key]


def test_tls_files_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="come together"):
        decant.Tls(certificate="c.pem")
    with pytest.raises(FileNotFoundError):
        Client("localhost:1", tls=decant.Tls(ca="nowhere.pem"))


async def test_tls_both_ways(tmp_path: Path) -> None:
    ours = Certificates(tmp_path)
    mutual: dict[str, Any] = {"tls_certificate": ours.certificate, "tls_key": ours.key, "tls_client_ca": ours.ca}
    async with scene(**mutual) as served:
        address = served.server.address
        tls = decant.Tls(ca=ours.ca, certificate=ours.certificate, key=ours.key, name="worker.decant")
        async with AsyncClient(address, tls=tls) as client:
            assert (await client.server_info()).version == "1"
        with Client(address, tls=tls) as blocking:
            assert (await asyncio.to_thread(blocking.server_info)).version == "1"
        for wrong, advice in (
            (None, "it may speak TLS, which tls=Tls(ca=...) (--ca) turns on"),
            (decant.Tls(ca=ours.ca), "it may ask for Tls(certificate=..., key=...) (--certificate, --key)"),
        ):
            async with AsyncClient(address, tls=wrong) as client:
                with pytest.raises(decant.Unavailable) as caught:
                    await client.server_info()
            assert str(caught.value) == f"no connection to {address}: it closed the connection: {advice}"


async def test_tls_that_does_not_fit_is_named(tmp_path: Path, address: str) -> None:
    ours = Certificates(tmp_path)
    async with scene(tls_certificate=ours.certificate, tls_key=ours.key) as served:
        for where, tls, advice in (
            (served.server.address, decant.Tls(ca=ours.ca, name="other"), "give it as Tls(name=...)"),
            (served.server.address, decant.Tls(), "does not chain to the roots of tls="),
            (address, decant.Tls(ca=ours.ca), "it speaks plaintext, and TLS is asked for"),
            ("127.0.0.1:1", None, "Connection refused"),
        ):
            async with AsyncClient(where, tls=tls) as client:
                with pytest.raises(decant.Unavailable) as caught:
                    await client.server_info()
            assert str(caught.value).startswith(f"no connection to {where}: ")
            assert advice in str(caught.value)


TOKEN = "s3cret-of-acme"
CALLS: dict[str, Callable[[Any], Any]] = {
    "Generate": lambda client: client.generate("x"),
    "GenerateStream": lambda client: client.stream("x"),
    "ResumeStream": lambda client: client.resume("r"),
    "GetGeneration": lambda client: client.generation("r"),
    "CancelGeneration": lambda client: client.cancel("r"),
    "Tokenize": lambda client: client.tokenize("x"),
    "Detokenize": lambda client: client.detokenize([5]),
    "ListModels": lambda client: client.models(),
    "GetModel": lambda client: client.model(),
    "GetServerInfo": lambda client: client.server_info(),
}


@pytest.mark.parametrize("token", [TOKEN, None])
def test_every_call_says_who_asks(script: Script, address: str, token: str | None) -> None:
    script.known["r"] = pb.GenerateRequest(request_id="r")
    with Client(address, token=token) as client:
        for call in CALLS.values():
            found = call(client)
            if isinstance(found, decant.Stream):
                assert [delta.text for delta in found] == ["a", "b", "c"]
    brought = [f"Bearer {token}"] if token else []
    ours = [call for call in script.authorized if call[0] in CALLS]
    assert ours == [(method, brought) for method in CALLS]


async def test_every_call_of_the_other_client_says_so_too(script: Script, address: str) -> None:
    script.known["r"] = pb.GenerateRequest(request_id="r")
    async with AsyncClient(address, token=TOKEN) as client:
        for call in CALLS.values():
            found = call(client)
            if isinstance(found, decant.AsyncStream):
                assert [delta.text async for delta in found] == ["a", "b", "c"]
            else:
                await found
    ours = [call for call in script.authorized if call[0] in CALLS]
    assert ours == [(method, [f"Bearer {TOKEN}"]) for method in CALLS]


def test_calls_are_all_that_the_service_has() -> None:
    assert set(CALLS) == set(pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name)


@pytest.mark.parametrize("token", ["", "two words", "s3cret\n", "s\u00e9cret"])
def test_a_token_that_cant_be_sent_is_refused_and_not_shown(token: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="token: printable ASCII") as refusal:
            kind("127.0.0.1:1", token=token)
        assert not token or token not in str(refusal.value)


def test_a_token_is_shown_nowhere(script: Script, address: str) -> None:
    script.refusal = decant.PermissionDenied("model x")
    with Client(address, token=TOKEN) as client:
        shown = [repr(client), repr(client._routers), str(vars(client))]
        with pytest.raises(decant.PermissionDenied) as refusal:
            client.generate("x")
    assert TOKEN not in " ".join([*shown, str(refusal.value), repr(refusal.value)])
