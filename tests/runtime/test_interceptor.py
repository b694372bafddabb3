import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from io import StringIO
from typing import Any, cast

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2
from decant.runtime.errors import InvalidArgument, ServiceError, from_call
from decant.runtime.serving.interceptor import ClientDisconnected
from decant.runtime.telemetry import logs
from decant.runtime.telemetry.logs import LogSettings
from tests.runtime.cases import ERRORS, IDS
from tests.runtime.harness import Harness, harness
from tests.worker.waiting import PATIENCE

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SECRET = "sk-12345: the inside of the house"


@pytest.fixture
def lines(out: StringIO) -> StringIO:
    logs.start("test", LogSettings(log_level="info"), stream=out)
    return out


def logged(out: StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


async def failure(harness: Harness, kind: str) -> tuple[list[Any], ServiceError]:
    got: list[Any] = []
    try:
        if kind == "unary":
            await harness.inference.Generate(pb.GenerateRequest())
        elif kind == "stream":
            call = harness.inference.GenerateStream(pb.GenerateRequest())
            while (message := await call.read()) is not grpc.aio.EOF:
                got.append(message)
        else:
            call = harness.decode.Session()
            await call.write(worker_pb2.RouterMessage())
            while (message := await call.read()) is not grpc.aio.EOF:
                got.append(message)
    except grpc.aio.AioRpcError as error:
        return got, from_call(error)
    raise AssertionError("no error came")


def raising(harness: Harness, error: BaseException, *, after: int = 0) -> None:
    async def unary(request: Any, context: Any) -> Any:
        raise error

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        for seq in range(after):
            yield pb.GenerateStreamResponse(seq=seq)
        raise error

    async def session(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            for _ in range(after):
                yield worker_pb2.WorkerMessage()
            raise error

    harness.script.unary, harness.script.stream, harness.script.session = unary, stream, session


async def test_every_error_arrives_as_it_was_raised_on_every_kind_of_call() -> None:
    async with harness() as s:
        for error, name in zip(ERRORS, IDS, strict=True):
            for kind, after in (("unary", 0), ("stream", 0), ("stream", 2), ("session", 1)):
                raising(s, error, after=after)
                got, back = await failure(s, kind)
                assert len(got) == (0 if kind == "unary" else after)
                assert type(back) is type(error), name
                assert back.detail == error.detail, name
        counts = {error.label: 0 for error in ERRORS}
        for error in ERRORS:
            counts[error.label] += 4
        assert {label: s.counted(reason=label) for label in counts} == counts
        assert s.counted(fault_owner="server") == 4 * sum(error.fault_owner == "server" for error in ERRORS)


async def test_pushback_is_sent_with_a_retry_delay() -> None:
    async with harness() as s:
        raising(s, ERRORS[IDS.index("QueueFull-queue_full-13")])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.inference.Generate(pb.GenerateRequest())
        trailing = caught.value.trailing_metadata()
        assert trailing is not None
        assert dict(trailing)["grpc-retry-pushback-ms"] == "250"


@pytest.mark.parametrize("kind", ["unary", "stream", "session"])
async def test_an_unexpected_exception_reveals_nothing_and_is_logged_once(kind: str, lines: StringIO) -> None:
    async with harness() as s:
        raising(s, KeyError(SECRET), after=1)
        _, back = await failure(s, kind)
        assert (back.code, back.label, str(back)) == (grpc.StatusCode.INTERNAL, "internal", "internal error")
        assert SECRET not in repr(back.detail)
        assert s.counted(reason="internal", fault_owner="server") == 1
    errors = [line for line in logged(lines) if line["level"] == "error"]
    assert len(errors) == 1
    assert SECRET in errors[0]["exception"]
    assert "Traceback" in errors[0]["exception"]
    assert errors[0]["method"].startswith("/decant.")


@pytest.mark.parametrize("kind", ["unary", "stream", "session"])
async def test_a_cancel_reaches_the_handler_and_counts_nowhere(kind: str, lines: StringIO) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def wait(*_: Any) -> Any:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async def stream(*_: Any) -> AsyncIterator[Any]:
        await wait()
        yield

    async with harness() as s:
        s.script.unary, s.script.stream, s.script.session = wait, stream, stream
        call = {
            "unary": lambda: s.inference.Generate(pb.GenerateRequest()),
            "stream": lambda: s.inference.GenerateStream(pb.GenerateRequest()),
            "session": s.decode.Session,
        }[kind]()
        await entered.wait()
        call.cancel()
        await asyncio.wait_for(left.wait(), PATIENCE)
        await s.inference.GetServerInfo(pb.GetServerInfoRequest())
        assert s.counted() == 0
    assert not [line for line in logged(lines) if line["level"] in ("error", "warning")]


async def test_a_generator_that_waits_to_send_is_closed_when_its_client_leaves() -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def endless(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            while True:
                entered.set()
                yield pb.GenerateStreamResponse(request_id="x" * 65536)
        finally:
            left.set()

    async with harness() as s:
        s.script.stream = endless
        call = s.inference.GenerateStream(pb.GenerateRequest())
        await entered.wait()
        await asyncio.sleep(0.1)  # without a reader, flow control stops the sender
        call.cancel()
        await asyncio.wait_for(left.wait(), PATIENCE)
        assert s.counted() == 0


async def test_a_handler_that_writes_by_itself_and_finds_its_client_gone_is_no_error(lines: StringIO) -> None:
    waiting, ended = asyncio.Event(), asyncio.Event()

    async def stream(request: Any, context: Any) -> None:
        await context.write(pb.GenerateStreamResponse())
        try:
            waiting.set()  # a cancellation during the first write is another case
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await context.write(pb.GenerateStreamResponse())
            except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
                raise ClientDisconnected from error
        finally:
            ended.set()

    async with harness() as s:
        s.script.stream = stream  # type: ignore[assignment]
        call = s.inference.GenerateStream(pb.GenerateRequest())
        await waiting.wait()
        call.cancel()
        async with asyncio.timeout(30):
            await ended.wait()
            await s.server._interceptor.wait_idle()
        assert s.counted() == 0
        assert not [line for line in logged(lines) if line["level"] in ("warning", "error")]


async def test_an_error_made_of_a_cancel_is_not_counted_and_one_in_its_cleanup_is(lines: StringIO) -> None:
    entered, left = asyncio.Event(), asyncio.Event()
    error: Exception = InvalidArgument("a", "b", "c")

    async def unary(*_: Any) -> Any:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.set()
            raise error from None

    async with harness() as s:
        s.script.unary = unary
        for counted in (0, 1):
            entered.clear()
            left.clear()
            call = s.inference.Generate(pb.GenerateRequest())
            await entered.wait()
            call.cancel()
            await left.wait()
            await s.inference.GetServerInfo(pb.GetServerInfoRequest())
            assert s.counted() == counted
            error = KeyError("in its cleanup")
    assert [line["event"] for line in logged(lines) if line["level"] == "error"] == ["unexpected exception"]


async def test_a_cancel_of_something_else_does_not_leave_the_call_hanging() -> None:
    async def unary(*_: Any) -> Any:
        other = asyncio.ensure_future(asyncio.Event().wait())
        asyncio.get_running_loop().call_later(0.05, other.cancel)
        await other

    async with harness() as s:
        s.script.unary = unary
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.inference.Generate(pb.GenerateRequest(), timeout=PATIENCE)
        assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_the_status_of_an_abort_is_passed_on() -> None:
    async def unary(_: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.DATA_LOSS, "as given")

    async with harness() as s:
        s.script.unary = unary
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.inference.Generate(pb.GenerateRequest())
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "as given")


async def test_repeated_client_errors_are_no_failure_of_the_server() -> None:
    async with harness() as s:
        raising(s, InvalidArgument("a", "b", "c"))
        calls = [s.inference.Generate(pb.GenerateRequest()) for _ in range(200)]
        for call in calls:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call
        assert s.counted(fault_owner="client") == 200
        assert s.counted(fault_owner="server") == 0
        assert (await s.inference.GetServerInfo(pb.GetServerInfoRequest())).version == "1"


@pytest.mark.parametrize("path", ["/decant.internal.v1.Decode/Session", REFLECTION])
async def test_a_message_of_a_stream_that_cannot_be_decoded_is_refused_by_name(
    path: str, lines: StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    async def session(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            yield worker_pb2.WorkerMessage()

    logs.start("test", LogSettings(log_level="debug"), stream=lines)
    async with harness() as s:
        s.script.session = session
        call: Any = s.channel.stream_stream(path)(cast(Any, iter([b"", b"\xff\xff"])))  # no bytes are an empty message
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read_all(call)
        error = from_call(caught.value)
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.value) == ("request", "2 bytes")
    assert [line["event"] for line in logged(lines) if line.get("method") or "exception" in line] == ["call failed"]
    assert not [record for record in caplog.records if record.exc_info]


async def _read_all(call: Any) -> None:
    async for _ in call:
        pass
