from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from decant import models as trained
from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.e2e.fork_server import Forked
from tests.router.harness import until
from tests.router.test_router_process import Running, become_ready, router

pytestmark = pytest.mark.slow
PATIENCE = 120.0


@dataclass
class Deployment:
    store: Store
    router: Running
    stub: inference_pb2_grpc.InferenceServiceStub
    workers: dict[str, Forked]
    received: int = 0
    """Tokens, of all answers."""

    async def answer(self, prompt: int, count: int, id: str = "") -> tuple[list[list[int]], pb.Receipt]:
        """Tokens of each output: of three for odd prompts, else of one."""
        request = generate_request(prompt, count, id)
        ids: list[list[int]] = [[] for _ in range(request.sampling.n)]
        last = pb.GenerateStreamResponse()
        async for message in self.stub.GenerateStream(request, timeout=PATIENCE):
            if message.HasField("delta"):
                ids[message.delta.index] += message.delta.token_ids
                self.received += len(message.delta.token_ids)
            last = message
        return ids, last.receipt

    async def audit(self, name: str) -> wire.AuditResponse:
        (address,) = (
            each.registration.address
            for each in (await self.store.workers.listing()).present
            if each.incarnation.id == name
        )
        async with grpc.aio.insecure_channel(address) as channel:
            answer: wire.AuditResponse = await services.AdminStub(channel).Audit(wire.AuditRequest())
            return answer

    async def is_clean(self, name: str) -> bool:
        found = await self.audit(name)
        assert not found.violations
        left = (found.owned_blocks, found.leased_blocks, found.ended_runs, found.orphans, len(found.owners))
        return left == (0, 0, 0, 0, 0)

    async def until_clean(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE):
            for name in names:
                while not await self.is_clean(name):  # noqa: ASYNC110 - another process's
                    await asyncio.sleep(0.1)


def generate_request(prompt: int, count: int, id: str = "") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=id,
        token_ids=pb.TokenIds(ids=[1 + (prompt * k) % 300 for k in range(prompt)]),
        sampling=pb.SamplingParams(seed=prompt, temperature=1.0, n=3 if prompt % 2 else 1),
        stopping=pb.StoppingParams(max_tokens=count, ignore_eos=True),
        response=pb.ResponseOptions(token_ids=True, text=False),
    )


@asynccontextmanager
async def worker(server: PrivateRedis, kind: str, name: str) -> AsyncIterator[Forked]:
    words = [*kind.split(), "--model", str(trained.path()), "--model-id", "m", "--id", name, "--port", "0"]
    words += ["--redis-url", server.url]
    process = await asyncio.to_thread(Forked, "tests.router.real_worker", words, 2, 2)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.to_thread(process.wait)


@asynccontextmanager
async def deployment(server: PrivateRedis, store: Store, **workers: str) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        processes = {
            name: await stack.enter_async_context(worker(server, kind, name)) for name, kind in workers.items()
        }
        async with asyncio.timeout(PATIENCE):
            listing = await store.workers.listing()
            while len(listing.present) < len(workers):
                assert all(process.returncode is None for process in processes.values())
                listing = await store.workers.wait_for_change(listing, 5.0)
        running = await stack.enter_async_context(router(server, "--drain-seconds", "5"))
        await become_ready(running)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(running.address))
        yield Deployment(store, running, inference_pb2_grpc.InferenceServiceStub(channel), processes)


async def test_answers_survive_the_loss_of_a_decode_worker_and_nothing_is_left(
    server: PrivateRedis, store: Store
) -> None:
    async with deployment(server, store, p="prefill", d="decode", e="decode") as harness:
        prompts = range(20, 28)
        quiet = await asyncio.gather(*[harness.answer(prompt, 400) for prompt in prompts])
        for ids, receipt in quiet:
            assert {len(each) for each in ids} == {400}
            assert receipt.prefill_worker == "p"
            assert receipt.decode_worker in "de"
            assert receipt.attempts == 1
        await harness.until_clean("p", "d", "e")
        some = harness.received + 8 * 10
        again = [asyncio.ensure_future(harness.answer(prompt, 400)) for prompt in prompts]
        await until(lambda: harness.received >= some)
        harness.workers["d"].send_signal(signal.SIGKILL)
        answers = await asyncio.gather(*again)
        assert [ids for ids, _ in answers] == [ids for ids, _ in quiet]
        assert any(receipt.attempts == 2 for _, receipt in answers)
        await harness.until_clean("p", "e")


async def test_answers_survive_the_loss_of_the_prefill_worker(server: PrivateRedis, store: Store) -> None:
    async with deployment(server, store, p="prefill", d="decode") as harness:
        quiet = await asyncio.gather(*[harness.answer(prompt, 10) for prompt in range(100, 108)])
        again = [asyncio.ensure_future(harness.answer(prompt, 10)) for prompt in range(100, 108)]
        await asyncio.sleep(0.05)
        harness.workers["p"].send_signal(signal.SIGKILL)
        assert [ids for ids, _ in await asyncio.gather(*again)] == [ids for ids, _ in quiet]
        await harness.until_clean("d")
        ids, receipt = await harness.answer(100, 10)
        assert ids == quiet[0][0]
        assert receipt.prefill_worker == ""


async def test_a_decode_worker_that_is_ended_hands_its_answers_on(server: PrivateRedis, store: Store) -> None:
    async with deployment(server, store, p="prefill", d="decode", e="decode") as harness:
        prompts = range(20, 28)
        quiet = await asyncio.gather(*[harness.answer(prompt, 400) for prompt in prompts])
        assert {receipt.decode_worker for _, receipt in quiet} == {"d", "e"}
        some = harness.received + 8 * 10
        again = [asyncio.ensure_future(harness.answer(prompt, 400)) for prompt in prompts]
        await until(lambda: harness.received >= some)
        harness.workers["d"].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(harness.workers["d"].wait, PATIENCE) == 0
        answers = await asyncio.gather(*again)
        assert [ids for ids, _ in answers] == [ids for ids, _ in quiet]
        ends = {(receipt.decode_worker, receipt.attempts) for _, receipt in answers}
        assert ends == {("e", 1)}, "a worker that waited for its own answers would have ended some of them"
        await harness.until_clean("p", "e")


async def test_a_worker_drains_at_once_when_its_router_left_after_an_answer(server: PrivateRedis, store: Store) -> None:
    """A run that ended but is not forgotten is kept for the lease, longer than the test waits."""
    async with deployment(server, store, d="decode --lease-ms 600000") as harness:
        await harness.answer(20, 10)
        harness.router.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(harness.router.process.wait, PATIENCE) == 0
        harness.workers["d"].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(harness.workers["d"].wait, PATIENCE) == 0


async def test_when_the_only_decode_worker_is_lost_the_prefill_worker_decodes(
    server: PrivateRedis, store: Store
) -> None:
    async with deployment(server, store, p="prefill", d="decode") as harness:
        quiet = await asyncio.gather(*[harness.answer(prompt, 400) for prompt in range(100, 104)])
        assert {receipt.decode_worker for _, receipt in quiet} == {"d"}
        some = harness.received + 4 * 10
        again = [asyncio.ensure_future(harness.answer(prompt, 400)) for prompt in range(100, 104)]
        await until(lambda: harness.received >= some)
        harness.workers["d"].send_signal(signal.SIGKILL)
        answers = await asyncio.gather(*again)
        assert [ids for ids, _ in answers] == [ids for ids, _ in quiet]
        assert any(receipt.attempts == 2 for _, receipt in answers)
        ids, receipt = await harness.answer(100, 400)
        assert ids == quiet[0][0]
        assert (receipt.prefill_worker, receipt.decode_worker, receipt.handoff_bytes) == ("", "p", 0)
        await harness.until_clean("p")


async def test_a_prefill_worker_that_returns_is_used_again(server: PrivateRedis, store: Store) -> None:
    async with deployment(server, store, p="prefill", d="decode") as harness:
        harness.workers["p"].send_signal(signal.SIGKILL)
        await asyncio.to_thread(harness.workers["p"].wait, PATIENCE)
        _, receipt = await harness.answer(100, 10)
        assert (receipt.prefill_worker, receipt.decode_worker) == ("", "d")
        async with worker(server, "prefill", "p"):
            async with asyncio.timeout(PATIENCE):
                count = 101
                while (await harness.answer(count, 10))[1].prefill_worker != "p":
                    count += 1
            await harness.until_clean("d")


async def test_a_client_that_leaves_or_cancels_frees_everything(server: PrivateRedis, store: Store) -> None:
    async with deployment(server, store, p="prefill", d="decode") as harness:
        calls = [harness.stub.GenerateStream(generate_request(30 + n, 400)) for n in range(4)]
        for call in calls:
            while not (await call.read()).HasField("delta"):
                pass
            call.cancel()
        named = harness.stub.GenerateStream(generate_request(50, 400, "named"))
        while not (await named.read()).HasField("delta"):
            pass
        done = await harness.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="named"))
        assert done.status == pb.CancelGenerationResponse.STATUS_CANCELLED
        await harness.until_clean("p", "d")
