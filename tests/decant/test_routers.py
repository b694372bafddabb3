from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import decant
from tests.decant.scripted import PATIENCE_S, Break, Script, serving
from tests.decant.two_routers import LOST, AsyncClient, Client, Two, is_whole
from tests.ports import kept


async def test_every_call_goes_to_a_router_that_runs(two: Two) -> None:
    dead = "127.0.0.1:1"
    live = two.address.split(",")[0]
    for address in (f"{dead},{live}", f"{live},{dead}", [dead, live]):
        async with AsyncClient(address) as client:
            for _ in range(3):
                assert (await client.server_info()).router_id == "r"
                assert (await client.generate("x")).text == "abc!"
                assert await client.cancel("r") is decant.CancelStatus.CANCELLED
                assert [delta.text async for delta in client.stream("x")] == ["a", "b", "c", "!"]


async def test_a_router_that_is_not_ready_is_skipped(two: Two) -> None:
    busy = Script(is_ready=False)
    with serving(busy) as address:
        async with AsyncClient(f"{address},{two.address}") as client:
            for _ in range(4):
                assert (await client.generate("x")).text == "abc!"
        async with AsyncClient(address, resume_seconds=0) as client:
            with pytest.raises(decant.Unavailable):
                await client.generate("x")
    assert (two.num_requests, busy.requests) == (4, [])


async def test_another_server_at_a_dead_router_s_address_is_skipped(two: Two) -> None:
    stranger = grpc.aio.server()
    port = stranger.add_insecure_port("127.0.0.1:0")
    await stranger.start()
    live = two.address.split(",")[0]
    try:
        for address in (f"127.0.0.1:{port},{live}", f"{live},127.0.0.1:{port}"):
            async with AsyncClient(address) as client:
                for _ in range(3):
                    assert (await client.server_info()).router_id == "r"
                    assert (await client.generate("x")).text == "abc!"
                    two.reset([Break(2, LOST)])
                    assert [delta.text async for delta in client.stream("x")] == ["a", "b", "c", "!"]
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(decant.Unimplemented):
                await client.server_info()
    finally:
        await stranger.stop(None)


async def test_a_target_with_several_addresses(two: Two) -> None:
    two.reset([Break(3, LOST)])
    async with AsyncClient(f"ipv4:{two.address}") as client:
        stream = client.stream("x")
        assert [delta.text async for delta in stream] == ["a", "b", "c", "!"]
        assert len(stream.resumed_at) == 1
        ends = time.monotonic() + PATIENCE_S
        while not all(script.requests for script in two.routers):  # until the second one is connected
            await client.generate("x")
            assert time.monotonic() < ends


def test_threads_share_a_client(two: Two) -> None:
    two.reset([Break(2 + number % 4, LOST) for number in range(40)])
    with Client(two.address) as client, ThreadPoolExecutor(8) as pool:

        def read_one(_: int) -> None:
            with client.stream("x", token_ids=True) as stream:
                is_whole(stream, list(stream))

        list(pool.map(read_one, range(40)))
    assert two.num_requests == 40


def test_requests_are_spread_over_the_routers(two: Two) -> None:
    with Client(two.address) as client:
        for _ in range(6):
            client.generate("x")
    assert [len(script.requests) for script in two.routers] == [3, 3]


def test_a_restarted_router_is_called_again(two: Two) -> None:
    gone, live = Script(), two.address.split(",")[0]
    with contextlib.ExitStack() as stack:
        with serving(gone) as address:
            stack.enter_context(kept(address))
        client = stack.enter_context(Client([address, live]))
        for _ in range(4):
            client.generate("x")
        with serving(gone, int(address.rpartition(":")[2])):
            ends = time.monotonic() + PATIENCE_S
            while not gone.requests:
                client.generate("x")
                assert time.monotonic() < ends
    assert two.num_requests >= 4
