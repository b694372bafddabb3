"""Token throughput of one session.

scripted worker, a process  ── frame: slots, positions, tokens of N sequences ──>  Session -> Output -> TokenStream

python -m bench.deployment.frames SEQUENCES      is the worker; its first line is the port
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.router.request.token_stream import TokenStream
from decant.router.request.valid_request import ValidRequest
from decant.router.text.output_text import OutputOptions
from decant.router.workers.session import WorkerSession
from decant.router.workers.subscription import MoveTest, RunSubscription
from decant.runtime.connections.channel import Deadline, open_channel
from decant.runtime.connections.peer import new_peer
from decant.runtime.connections.tls import PeerTls
from decant.state.ids import RequestKey

PROMPT = 16
MAX_TOKENS = 1 << 30
WARM_SECONDS = 0.5
BEGIN_SECONDS = 30.0


# -- the scripted worker -----------------------------------------------------------------------------------------


class Scripted(services.DecodeServicer):
    def __init__(self, sequences: int) -> None:
        self._sequences = sequences

    async def Session(  # noqa: N802 - the name of the method
        self, requests: AsyncIterator[wire.RouterMessage], _: Any
    ) -> AsyncIterator[wire.WorkerMessage]:
        runs: list[wire.Run] = []
        async for message in requests:
            if message.HasField("hello"):
                lacking = [owned.run for owned in message.hello.owned]
                yield wire.WorkerMessage(welcome=wire.Welcome(worker=message.hello.worker, unknown_runs=lacking))
            elif message.HasField("start"):
                runs.append(message.start.run)
                if len(runs) == self._sequences:
                    break
        for slot, run in enumerate(runs):
            yield wire.WorkerMessage(
                decode_started=wire.DecodeStarted(run=run, slots=[wire.Slot(slot=slot, position=PROMPT)])
            )
        slots = array("I", range(self._sequences)).tobytes()
        tokens = array("I", [7] * self._sequences).tobytes()
        step = 0
        while True:
            positions = array("I", [PROMPT + step] * self._sequences).tobytes()
            step += 1
            yield wire.WorkerMessage(frame=wire.Frame(step=step, slots=slots, positions=positions, tokens=tokens))


async def serve(sequences: int) -> None:
    server = grpc.aio.server()
    services.add_DecodeServicer_to_server(Scripted(sequences), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


# -- the router's side -------------------------------------------------------------------------------------------


class _Observer:
    def on_opened(self, session: WorkerSession) -> None: ...
    def on_heartbeat(self, session: WorkerSession, heartbeat: wire.Heartbeat) -> None: ...


class _Listener:
    def on_scheduled(self, message: wire.Scheduled) -> None: ...
    def on_decode_started(self, message: wire.DecodeStarted) -> None: ...
    def on_run_status(self, status: wire.RunStatus) -> None: ...
    def on_offer(self, ticket: wire.Ticket) -> None: ...
    def on_draining(self) -> None: ...

    def on_crowded(self, count: int, is_worth: MoveTest) -> int:
        return 0

    def on_prompt_logprobs(self, message: wire.PromptLogprobs) -> None: ...
    def on_ended(self, end: wire.OutputEnd, *, is_last: bool) -> None: ...
    def on_refused(self, refused: wire.Refused) -> None: ...
    def on_failed(self, failed: wire.Failed) -> None: ...
    def on_superseded(self, superseded: wire.Superseded) -> None: ...


async def tokens_per_second(sequences: int, seconds: float, warm_s: float = WARM_SECONDS) -> float:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "bench.deployment.frames", str(sequences)]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    channel = open_channel(f"127.0.0.1:{int(await process.stdout.readline())}", PeerTls())
    session = WorkerSession(new_peer("router"), new_peer("scripted"), channel, _Observer())
    streams = [_stream(number) for number in range(sequences)]
    for stream in streams:
        start = wire.Start(run=wire.Run(request=str(stream.request.key), epoch=1, attempt=1))
        session.start(RunSubscription(start, stream.outputs, _Listener()))
    running = asyncio.create_task(session.run(lambda: True))
    try:
        async with asyncio.timeout(BEGIN_SECONDS):
            await asyncio.gather(*[stream.wait_beyond(0) for stream in streams])
        await asyncio.sleep(warm_s)
        before, began = _written(streams), time.monotonic()
        await asyncio.sleep(seconds)
        return (_written(streams) - before) / (time.monotonic() - began)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await channel.close()
        process.stdin.close()
        await process.wait()


def _written(streams: Iterable[TokenStream]) -> int:
    return sum(stream.num_tokens for stream in streams)


def _stream(number: int) -> TokenStream:
    request = ValidRequest(
        key=RequestKey("tenant", str(number)),
        payload=pb.GenerateRequest(),
        engine_request=wire.EngineRequest(stopping=wire.Stopping(max_tokens=MAX_TOKENS)),
        prompt_tokens=PROMPT,
        output_options=OutputOptions(),
        deadline=Deadline(),
        id_generated=False,
        accepted_at=0.0,
    )
    return TokenStream(request)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
