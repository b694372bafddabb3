import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import pytest

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client_checks import TOKENIZER, ask, check_generated, generate_request, open_stub
from tests.e2e.deployment import Deployment, deployment
from tests.e2e.proxy import Proxy, Tamper, proxy

pytestmark = pytest.mark.slow

PROMPT = "def total(values):\n    result = 0\n" * 12


@pytest.fixture(scope="module")
def harness() -> Iterator[tuple[Deployment, Proxy]]:
    with ExitStack() as stack:
        between = stack.enter_context(proxy())
        running = stack.enter_context(deployment(between=(between,)))
        yield running, between


def flipped() -> Tamper:
    def change(message: wire.FetchResponse) -> Iterable[wire.FetchResponse]:
        if message.HasField("kv_chunk"):
            data = bytearray(message.kv_chunk.data)
            data[len(data) // 2] ^= 1
            message.kv_chunk.data = bytes(data)
        return [message]

    return change


def truncated() -> Tamper:
    def change(message: wire.FetchResponse) -> Iterable[wire.FetchResponse]:
        if message.HasField("kv_chunk"):
            message.kv_chunk.data = message.kv_chunk.data[:-8]
        return [message]

    return change


def lost() -> Tamper:
    seen: list[int] = []

    def change(message: wire.FetchResponse) -> Iterable[wire.FetchResponse]:
        if message.HasField("kv_chunk"):
            seen.append(1)
            return [] if len(seen) == 1 else [message]
        return [message]

    return change


def swapped() -> Tamper:
    def change(message: wire.FetchResponse) -> Iterable[wire.FetchResponse]:
        if message.HasField("kv_chunk") and len(message.kv_chunk.block_checksums) > 1:
            chunk = message.kv_chunk
            size = len(chunk.data) // len(chunk.block_checksums)
            chunk.data = chunk.data[size : 2 * size] + chunk.data[:size] + chunk.data[2 * size :]
            chunk.block_checksums[0], chunk.block_checksums[1] = chunk.block_checksums[1], chunk.block_checksums[0]
        return [message]

    return change


def of_another() -> Tamper:
    stale: list[wire.FetchResponse] = []

    def change(message: wire.FetchResponse) -> Iterable[wire.FetchResponse]:
        if message.HasField("kv_chunk"):
            stale.append(message)
            return [stale[0]]
        return [message]

    return change


def resealed() -> Tamper:
    def change(message: wire.FetchResponse) -> Iterable[wire.FetchResponse]:
        if message.HasField("commit"):
            tokens = bytearray(message.commit.outputs[0].tokens)
            tokens[0] ^= 1
            message.commit.outputs[0].tokens = bytes(tokens)
        return [message]

    return change


def cut() -> Tamper:
    return lambda message: [] if message.HasField("commit") else [message]


KINDS = [flipped, truncated, lost, swapped, of_another, resealed, cut]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_corrupt_transfers_are_refused_and_the_output_is_right(
    harness: tuple[Deployment, Proxy], kind: Callable[[], Tamper]
) -> None:
    running, between = harness
    prompt = f"# {kind.__name__}\n" + PROMPT
    ids = TOKENIZER.encode(prompt).ids
    channel, stub = open_stub(running.address)
    async with channel:
        between.tamper = None
        before = between.fetches
        clean = await ask(stub, generate_request(prompt[:60], max_tokens=8))
        assert clean.receipt.attempts == 1
        between.tamper = kind()
        if kind is of_another:
            await _spoil(stub, "# another\n" + prompt[:200])
        answer = await ask(stub, generate_request(prompt, max_tokens=30))
        between.tamper = None
    assert between.fetches >= before + 2
    check_generated(ids, answer.ids, 30)
    assert answer.receipt.attempts > 1
    assert answer.usage.completion_tokens == len(answer.ids)
    await asyncio.to_thread(running.settled)


async def test_a_silent_sender_is_lost_and_the_output_is_right(harness: tuple[Deployment, Proxy]) -> None:
    running, between = harness
    channel, stub = open_stub(running.address)
    async with channel:
        between.is_mute = True
        answer = await ask(stub, generate_request("# silent\n" + PROMPT, max_tokens=30))
        between.is_mute = False
    check_generated(TOKENIZER.encode("# silent\n" + PROMPT).ids, answer.ids, 30)
    assert answer.receipt.attempts > 1
    await asyncio.to_thread(running.settled)


async def _spoil(stub: InferenceServiceStub, prompt: str) -> None:
    """Fetch a cache, itself unchanged, whose first chunk `of_another` sends in a later fetch."""
    await ask(stub, generate_request(prompt, max_tokens=4))
