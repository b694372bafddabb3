import asyncio
import gc
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from decant.protos import inference_pb2 as pb
from decant.runtime.error_details import Reason
from decant.runtime.errors import Unavailable, from_call
from decant.runtime.serving.health import State
from decant.runtime.serving.server import Service
from decant.runtime.serving.server_settings import ServerSettings
from decant.runtime.serving.shutdown import race
from decant.runtime.settings import SettingError
from tests.runtime.harness import INFERENCE, Harness, harness
from tests.worker.waiting import PATIENCE

SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


async def health(s: Harness) -> dict[str, int]:
    response = await health_pb2_grpc.HealthStub(s.channel).List(health_pb2.HealthListRequest())
    return {name: one.status for name, one in response.statuses.items()}


async def until(s: Harness, state: State) -> None:
    readiness = s.server.readiness
    async with asyncio.timeout(PATIENCE):
        while readiness.state is not state:
            await readiness.wait_for_change(readiness.state)


class Stream:
    def __init__(self, s: Harness) -> None:
        self.let = asyncio.Event()
        self.left = asyncio.Event()
        s.script.stream = self._answer
        self.call = s.inference.GenerateStream(pb.GenerateRequest())

    async def _answer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield pb.GenerateStreamResponse(seq=1)
            await self.let.wait()
            yield pb.GenerateStreamResponse(seq=2)
        finally:
            self.left.set()

    async def begun(self) -> "Stream":
        assert (await self.call.read()).seq == 1
        return self


async def test_alive_at_once_and_ready_only_after_warm_up() -> None:
    warm = asyncio.Event()

    async def warm_up(server: Any) -> None:
        assert server.port > 0
        await warm.wait()

    async with harness(warm_up=warm_up) as s:
        names = {"", "ready", "decant.v1.InferenceService", "decant.internal.v1.Decode"}
        assert await health(s) == {"alive": SERVING} | dict.fromkeys(names, NOT_SERVING)
        warm.set()
        await until(s, State.READY)
        assert await health(s) == {"alive": SERVING} | dict.fromkeys(names, SERVING)
        check = health_pb2_grpc.HealthStub(s.channel).Check
        assert (await check(health_pb2.HealthCheckRequest(service="ready"))).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert s.counted() == 0


async def test_a_watch_sees_each_change_and_ends_with_the_server() -> None:
    async with harness() as s:
        watch = health_pb2_grpc.HealthStub(s.channel).Watch
        call = watch(health_pb2.HealthCheckRequest())
        assert (await call.read()).status == SERVING
        assert (await watch(health_pb2.HealthCheckRequest(service="nobody")).read()).status == UNKNOWN
        stream = await Stream(s).begun()
        s.server.shutdown.request("test")
        assert (await call.read()).status == NOT_SERVING
        stream.let.set()
        assert await asyncio.wait_for(s.running, PATIENCE)


async def test_a_failure_is_reported_and_ends_the_server() -> None:
    async with harness() as s:
        call = health_pb2_grpc.HealthStub(s.channel).Watch(health_pb2.HealthCheckRequest(service="alive"))
        assert (await call.read()).status == SERVING
        stream = await Stream(s).begun()
        s.server.readiness.mark_failed("the engine's thread ended")
        assert not await asyncio.wait_for(s.running, PATIENCE)
        assert stream.left.is_set()
        assert not s.server.readiness.is_alive


async def test_a_warm_up_that_raises_ends_the_server() -> None:
    async def warm_up(server: Any) -> None:
        raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        async with harness(warm_up=warm_up) as s:
            await s.running


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_all_services_and_gives_their_files(version: str) -> None:
    async with harness() as s:
        call: Any = s.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        assert listed == {
            "decant.v1.InferenceService",
            "decant.internal.v1.Decode",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        for name in listed:  # as `grpcurl describe` asks
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
            files = (await call.read()).file_descriptor_response.file_descriptor_proto
            packages = {FileDescriptorProto.FromString(file).package for file in files}
            assert name.rpartition(".")[0] in packages
        call.cancel()


async def test_a_drain_lets_streams_end_and_takes_no_new_work() -> None:
    async with harness() as s:
        stream = await Stream(s).begun()
        s.server.shutdown.request("test")
        await until(s, State.STOPPED)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await s.inference.Generate(pb.GenerateRequest())
        assert from_call(refused.value).reason is Reason.DRAINING
        stream.let.set()
        assert (await stream.call.read()).seq == 2
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK
        assert await asyncio.wait_for(s.running, PATIENCE)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", s.server.port)


async def test_during_a_drain_only_public_services_are_closed() -> None:
    draining, handed_on = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        draining.set()
        await handed_on.wait()

    async with harness(drain=drain) as s:
        stream = await Stream(s).begun()
        s.server.shutdown.request("test")
        await draining.wait()
        assert (await health(s))["decant.v1.InferenceService"] == NOT_SERVING
        assert (await health(s))["alive"] == SERVING
        for call in (
            s.inference.Generate(pb.GenerateRequest()),
            s.inference.GenerateStream(pb.GenerateRequest()).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            error = from_call(refused.value)
            assert isinstance(error, Unavailable)
            assert (error.reason, error.retryable) == (Reason.DRAINING, True)
        assert (await s.inference.GetServerInfo(pb.GetServerInfoRequest())).version == "1"
        stream.let.set()
        handed_on.set()
        assert await asyncio.wait_for(s.running, PATIENCE)
        assert s.counted(reason="draining", fault_owner="capacity") == 2


@pytest.mark.parametrize("stuck_in", ["drain", "stream"])
async def test_the_grace_period_ends_a_drain(stuck_in: str) -> None:
    async def drain() -> None:
        if stuck_in == "drain":
            await asyncio.Event().wait()

    async with harness(drain=drain, drain_seconds=0.3) as s:
        stream = await Stream(s).begun()
        s.server.shutdown.request("test")
        assert not await asyncio.wait_for(s.running, PATIENCE)
        assert stream.left.is_set()


async def test_a_second_signal_ends_the_server_at_once() -> None:
    async with harness() as s:
        stream = await Stream(s).begun()
        s.server.shutdown.request("test")
        await until(s, State.STOPPED)
        s.server.shutdown.request("test")
        assert not await asyncio.wait_for(s.running, PATIENCE)
        assert stream.left.is_set()


async def test_a_signal_during_warm_up_ends_the_server() -> None:
    async def warm_up(server: Any) -> None:
        await asyncio.Event().wait()

    async with harness(warm_up=warm_up) as s:
        s.server.shutdown.request("test")
        assert await asyncio.wait_for(s.running, PATIENCE)


async def test_two_servers_do_not_share_a_port_by_default() -> None:
    async with harness() as s:
        with pytest.raises(SettingError, match=f"port: .*127.0.0.1:{s.server.port}"):
            async with harness(port=s.server.port):
                pass
        async with harness(admin_port=0) as other:
            with pytest.raises(SettingError, match="admin_port"):
                async with harness(admin_port=other.server.admin_port):
                    pass
    async with harness(reuse_port=True) as s, harness(reuse_port=True, port=s.server.port) as other:
        assert s.server.port == other.server.port


async def test_the_admin_port_serves_health_and_metrics() -> None:
    async with harness(admin_port=0) as s:

        def get(path: str) -> tuple[int, str]:
            try:
                url = f"http://127.0.0.1:{s.server.admin_port}{path}"
                with urllib.request.urlopen(url, timeout=PATIENCE) as response:
                    return response.status, response.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        await until(s, State.READY)
        with pytest.raises(grpc.aio.AioRpcError):
            await s.inference.Generate(pb.GenerateRequest())  # unscripted
        assert await asyncio.to_thread(get, "/ready") == (200, "ready\n")
        assert await asyncio.to_thread(get, "/alive") == (200, "ready\n")
        assert (await asyncio.to_thread(get, "/other"))[0] == 404
        status, text = await asyncio.to_thread(get, "/metrics")
        assert status == 200
        assert 'decant_errors_total{code="INTERNAL",fault_owner="server",reason="internal"} 1.0' in text
        stream = await Stream(s).begun()
        s.server.shutdown.request("test")
        await until(s, State.STOPPED)
        assert (await asyncio.to_thread(get, "/ready"))[0] == 503
        assert (await asyncio.to_thread(get, "/alive"))[0] == 200
        stream.let.set()


def test_a_public_service_has_to_exist() -> None:
    with pytest.raises(ValueError, match=r"decant\.v1\.InferenceService has no Generates"):
        Service(INFERENCE, lambda server: None, frozenset({"Generates"}))


async def test_the_first_task_to_end_cancels_the_others() -> None:
    ended = asyncio.Event()

    async def loser() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 0

    async def winner() -> int:
        await asyncio.sleep(0)
        return 7

    assert await race(loser(), winner()) == 7
    assert ended.is_set()


async def test_of_concurrent_failures_one_is_raised_and_all_tasks_end() -> None:
    left: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context))

    async def failing(words: str) -> None:
        raise ValueError(words)

    with pytest.raises(ValueError, match="one"):
        await race(failing("one"), failing("two"))
    gc.collect()
    assert not left


PROCESS = """
import asyncio, gc, sys
from decant.runtime.telemetry import logs
from decant.runtime.serving.health import Readiness
from decant.runtime.serving.server_settings import ServerSettings
from decant.runtime.settings_sources import load_or_exit
from decant.runtime.telemetry.metrics import Registry
from decant.runtime.serving.server import serve
from decant.runtime.serving.shutdown import run
from tests.runtime.harness import Script, services

class Settings(ServerSettings, logs.LogSettings):
    pass

async def stream(request, context):
    from decant.protos import inference_pb2 as pb
    yield pb.GenerateStreamResponse(seq=1)
    await asyncio.sleep(30 if request.prompt == "long" else 0.5)
    yield pb.GenerateStreamResponse(seq=2)

async def main():
    settings = load_or_exit(Settings, sys.argv[1:])
    logs.start("process", settings)
    async def warm_up(server):
        pass
    drained = await serve(services(Script(stream=stream)), settings, Readiness(), Registry(), warm_up=warm_up)
    assert gc.get_freeze_count(), "what it is made of is looked through for garbage"
    return 0 if drained else 1

sys.exit(run(main()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "signals", "code"), [("short", 1, 0), ("long", 2, 1)])
async def test_signals_drain_and_end_the_process(prompt: str, signals: int, code: int) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, "--port=0", cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    serving = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
    assert (serving["event"], serving["service"], serving["level"]) == ("serving", "process", "info")
    async with grpc.aio.insecure_channel(serving["address"]) as channel:
        from decant.protos import inference_pb2_grpc

        call = inference_pb2_grpc.InferenceServiceStub(channel).GenerateStream(pb.GenerateRequest(prompt=prompt))
        assert (await call.read()).seq == 1
        for _ in range(signals):
            os.kill(process.pid, signal.SIGTERM)
            event = ""  # two signals at once may be one
            while event != "shutdown":
                event = json.loads(await asyncio.wait_for(process.stdout.readline(), PATIENCE))["event"]
        if code == 0:
            assert (await call.read()).seq == 2
            assert await call.code() is grpc.StatusCode.OK
        assert await asyncio.wait_for(process.wait(), PATIENCE) == code


def test_a_server_listens_on_loopback_by_default() -> None:
    assert ServerSettings().host == "127.0.0.1"
