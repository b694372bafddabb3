from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from tokenizers import Tokenizer

from decant import models
from decant.protos import inference_pb2 as pb
from decant.protos.vllm import common_pb2 as common
from decant.protos.vllm import vllm_engine_pb2 as vllm
from decant.router.api.auth import Authenticator, load
from decant.router.request.output import Finish
from decant.router.text.served_model import Models
from decant.router.vllm.metadata import MODEL, OBJECTIVE, TTL
from decant.router.vllm.tokenizer_archive import CHUNK_BYTES, TokenizerArchive
from decant.runtime.error_details import Reason
from decant.runtime.errors import DeadlineExceeded, InvalidArgument, NotFound, QueueFull, Unavailable, from_call
from decant.runtime.grpc_options import ACCEPTED
from tests.router.factories import AT_LENGTH, STOPPED, model, tiny, write
from tests.router.service_harness import PATIENCE, Harness, error_of_call, harness, writes

SECRET = "correct horse"
METHODS = vllm.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name
REQUESTS: dict[str, Any] = {name: GetMessageClass(method.input_type) for name, method in METHODS.items()}
AT_STOP_STRING = Finish(pb.FINISH_REASON_STOP, stop_string="end")
AT_STOP_TOKEN = Finish(pb.FINISH_REASON_STOP, stop_token_id=6)


def request(**fields: Any) -> vllm.GenerateRequest:
    sampling = vllm.SamplingParams(**fields.pop("sampling", {}))
    tokenized = vllm.TokenizedInput(input_ids=[5, 6, 7])
    return vllm.GenerateRequest(**{"tokenized": tokenized, "stream": True, **fields}, sampling_params=sampling)


async def answer(s: Harness, *tokens: int, end: Any = AT_LENGTH, **fields: Any) -> list[vllm.GenerateResponse]:
    s.requests.plan = writes(*tokens, end=end)
    return [message async for message in s.vllm.Generate(request(**fields))]


async def error_of(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in call:
            pass
    return from_call(error.value)


async def test_a_stream_is_chunks_of_new_tokens_and_then_all_of_them():
    async with harness() as s:
        call = s.vllm.Generate(request(request_id="r"))
        stream = await s.stream()
        stream.cached_tokens = 2
        for token in (5, 6):
            write(stream, token)
            chunk = (await call.read()).chunk
            assert (list(chunk.token_ids), chunk.completion_tokens) == ([token], 1)
            assert (chunk.prompt_tokens, chunk.cached_tokens) == (3, 2)
        write(stream, 1, end=STOPPED)
        assert list((await call.read()).chunk.token_ids) == [1]
        complete = (await call.read()).complete
        assert list(complete.output_ids) == [5, 6, 1]
        assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 3, 2)
        assert complete.finish_reason == "stop"
        assert complete.WhichOneof("matched_stop") is None, "the end of sequence is no stop of the request"
        assert await call.read() is grpc.aio.EOF
        assert (ACCEPTED, "true") in tuple(await call.initial_metadata())


async def test_without_streaming_there_is_one_message():
    async with harness() as s:
        (message,) = await answer(s, 5, 6, stream=False, sampling={"logprobs": 1})
        assert list(message.complete.output_ids) == [5, 6]
        assert list(message.complete.output_logprobs.token_ids) == [5, 6]
        assert len(message.complete.output_logprobs.top_logprobs) == 2
        assert message.complete.finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("end", "matched", "value"),
    [(AT_STOP_STRING, "matched_stop_str", "end"), (AT_STOP_TOKEN, "matched_token_id", 6)],
)
async def test_the_matched_stop_is_named(stream: bool, end: Finish, matched: str, value: Any):
    async with harness() as s:
        complete = (await answer(s, 5, 6, end=end, stream=stream))[-1].complete
        assert complete.WhichOneof("matched_stop") == matched
        assert getattr(complete, matched) == value


async def test_logprobs_are_those_of_each_chunk_and_alternatives_only_if_requested():
    async with harness() as s:
        for count in (0, 2):
            first, complete = await answer(s, 5, 6, sampling={"logprobs": count})
            logprobs = first.chunk.output_logprobs
            assert list(logprobs.token_ids) == [5, 6]
            assert len(logprobs.token_logprobs) == 2
            assert [len(top.token_ids) for top in logprobs.top_logprobs] == ([2, 2] if count else [])
            assert not complete.complete.HasField("output_logprobs"), "the client has them"
        first, _ = await answer(s, 5)
        assert not first.chunk.HasField("output_logprobs")


async def test_each_of_several_outputs_has_its_chunks_and_its_end():
    async with harness() as s:
        call = s.vllm.Generate(request(sampling={"n": 2}))
        stream = await s.stream()
        write(stream, 5)
        stream.outputs[1].tokens += [7, 8]
        write(stream, end=AT_LENGTH)
        messages = [message async for message in call]
        chunks = {
            message.chunk.index: list(message.chunk.token_ids) for message in messages if message.HasField("chunk")
        }
        ends = {
            message.complete.index: (list(message.complete.output_ids), message.complete.completion_tokens)
            for message in messages
            if message.HasField("complete")
        }
        assert chunks == {0: [5], 1: [7, 8]}
        assert ends == {0: ([5], 1), 1: ([7, 8], 2)}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_is_a_status_and_no_finish_reason(stream: bool):
    async with harness() as s:
        lost = Unavailable(Reason.WORKERS_LOST, "3 attempts failed", retry_after=1.0)
        s.requests.plan = writes(5, end=lost)
        error = await error_of(s.vllm.Generate(request(stream=stream)))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.WORKERS_LOST)


async def test_a_refusal_is_trailers_alone_so_that_grpc_may_retry_it():
    async with harness() as s:
        s.requests.refusal = QueueFull(3, retry_after=1.5)
        call = s.vllm.Generate(request())
        assert (await error_of(call)).reason is Reason.QUEUE_FULL
        assert ACCEPTED not in dict(await call.initial_metadata())


async def test_an_abort_cancels_the_named_requests_and_ignores_unknown_ids():
    async with harness() as s:
        call = s.vllm.Generate(request(request_id="r"))
        await s.stream()
        await s.vllm.Abort(vllm.AbortRequest(request_ids=["r", "unknown"]))
        assert (await error_of(call)).reason is Reason.CANCELLED


async def test_an_abort_of_too_many_requests_is_refused():
    async with harness() as s:
        error = await error_of_call(s.vllm.Abort(vllm.AbortRequest(request_ids=["r"] * 1025)))
        assert isinstance(error, InvalidArgument)
        assert error.field == "request_ids"


async def test_a_client_that_leaves_is_a_disconnection():
    async with harness() as s:
        call = s.vllm.Generate(request(request_id="r"))
        stream = await s.stream()
        write(stream, 5)
        await call.read()
        call.cancel()
        assert await s.lost() is stream


async def test_a_request_that_waits_longer_than_its_ttl_is_cancelled():
    async with harness() as s:
        cancelled: list[str] = []

        async def wait(valid: Any, on_waiting: Any = None) -> Any:
            await asyncio.Event().wait()

        async def cancel(key: Any) -> Any:
            cancelled.append(key.id)
            raise NotFound("request", key.id)

        s.requests.begin = wait  # type: ignore[method-assign, assignment]
        s.requests.cancel = cancel  # type: ignore[method-assign]
        error = await error_of(s.vllm.Generate(request(request_id="r"), metadata=((TTL, "50ms"),)))
        assert isinstance(error, DeadlineExceeded)
        assert TTL in str(error)
        assert cancelled == ["r"]


async def test_priority_and_model_are_those_of_the_metadata():
    served = Models([tiny(), model(id="second")])
    async with harness(served) as s:
        call = s.vllm.Generate(request(), metadata=((OBJECTIVE, "critical"), (MODEL, "second")))
        work = (await s.stream()).request.engine_request
        assert (work.priority, work.model) == (100, "second")
        call.cancel()


async def test_model_and_server_are_described():
    async with harness() as s:
        info = await s.vllm.GetModelInfo(vllm.GetModelInfoRequest())
        assert (info.served_model_name, info.vocab_size, info.is_generation) == ("tiny-python", 4096, True)
        assert (info.max_context_length, info.max_req_input_len) == (2048, 2047)
        assert (list(info.architectures), info.model_type) == (["LlamaForCausalLM"], "llama")
        assert list(info.eos_token_ids) == [1]
        assert json.loads(info.default_sampling_params_json)["top_k"] == 0
        server = await s.vllm.GetServerInfo(vllm.GetServerInfoRequest())
        assert (server.active_requests, server.uptime_seconds, server.max_num_seqs) == (3, 5.0, 8)
        (load_,) = (await s.vllm.GetLoads(vllm.GetLoadsRequest())).loads
        assert (load_.num_running_reqs, load_.num_waiting_reqs, load_.num_total_reqs) == (2, 1, 3)
        assert (load_.token_usage, load_.num_used_tokens, load_.max_total_num_tokens) == (0.25, 400, 1600)
        assert load_.num_waiting_uncached_tokens == 30


async def test_the_archive_of_the_tokenizer_makes_an_equal_tokenizer(tmp_path: Path):
    async with harness() as s:
        chunks = [chunk async for chunk in s.vllm.GetTokenizer(common.GetTokenizerRequest())]
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
    content = b"".join(chunk.data for chunk in chunks)
    assert hashlib.sha256(content).hexdigest() == chunks[-1].sha256
    archive = zipfile.ZipFile(io.BytesIO(content))
    archive.extractall(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(archive.namelist())
    text = "def f(x):\n    return x"
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.encode(text).ids == tiny().tokenizer.encode(text).ids
    assert TokenizerArchive.of(models.path()).sha256 == chunks[-1].sha256, "the same on each router"


async def test_health_is_that_of_the_process():
    async with harness() as s:
        async with asyncio.timeout(PATIENCE):
            assert (await s.vllm.HealthCheck(vllm.HealthCheckRequest())).healthy


@pytest.mark.parametrize("method", ["SubscribeKvEvents", "FlushCache", "StartProfile", "StopProfile"])
async def test_other_methods_say_that_they_are_not_implemented(method: str):
    async with harness() as s:
        call = getattr(s.vllm, method)(REQUESTS[method]())
        error = await error_of(call) if METHODS[method].server_streaming else await error_of_call(call)
        assert error.code is grpc.StatusCode.UNIMPLEMENTED
        assert f"{method}: not implemented" in str(error)


@pytest.fixture
def callers(tmp_path: Path) -> Authenticator:
    file = tmp_path / "tenants.toml"
    file.write_text(f'[tenants.acme]\ntokens = ["{hashlib.sha256(SECRET.encode()).hexdigest()}"]\n')
    return load(file, Models([tiny()]))


@pytest.mark.parametrize("method", ["Generate", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer"])
async def test_calls_are_authenticated(callers: Authenticator, method: str):
    async with harness(callers=callers) as s:
        call = getattr(s.vllm, method)(REQUESTS[method]())
        error = await error_of(call) if METHODS[method].server_streaming else await error_of_call(call)
        assert error.reason is Reason.NO_CREDENTIALS


async def test_a_request_is_its_tenants(callers: Authenticator):
    async with harness(callers=callers) as s:
        call = s.vllm.Generate(request(request_id="r"), metadata=(("authorization", f"Bearer {SECRET}"),))
        assert (await s.stream()).request.key.tenant == "acme"
        call.cancel()


async def test_an_embedding_has_the_tokens_values_and_the_metadata_of_the_call():
    async with harness() as s:
        tokenized = vllm.TokenizedInput(input_ids=[5, 6, 7])
        metadata = ((OBJECTIVE, "critical"),)
        response = await s.vllm.Embed(vllm.EmbedRequest(tokenized=tokenized), metadata=metadata)
        assert response == vllm.EmbedResponse(embedding=[3, 0.5], prompt_tokens=3, embedding_dim=2)
        (batch,) = s.requests.prompts.batches
        assert batch.priority == 100
        error = await error_of_call(s.vllm.Embed(vllm.EmbedRequest()))
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.value) == ("tokenized.input_ids", "0")
