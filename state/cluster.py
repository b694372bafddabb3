"""The primary of one slot of a Redis Cluster: the hash tag of their prefix puts all keys of a deployment into it.

A command is one node's, as with a single Redis: scripts and pipelines keep their order, and a lost node loses all or
nothing. The node's replicas take over, and deployments with other prefixes use other nodes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from decant.state.primary import DISCOVERY_SECONDS, Address, PrimaryAddress
from decant.state.urls import ClusterUrl

_REFUSALS = (exceptions.ResponseError, exceptions.AuthenticationError)


class SlotRange(NamedTuple):
    first: int
    last: int
    nodes: list[Address]  # the primary, then its replicas


class SlotPrimary(PrimaryAddress):
    def __init__(self, url: ClusterUrl, key_prefix: str, on_change: Callable[[], None]) -> None:
        super().__init__(on_change)
        self._slot = key_slot(key_prefix.encode())
        self._seeds = url.addresses
        self._nodes: set[Address] = set()  # as a node named them last
        limits = {"socket_timeout": None, "socket_connect_timeout": None}  # the command has a deadline
        self._options = {**url.connection, **limits, "protocol": 2, "retry": Retry(NoBackoff(), 0)}

    async def discover(self) -> Address:
        """Ask the nodes in random order, as one that is cut off from the others may name an earlier primary.

        A node that has not answered after DISCOVERY_SECONDS is not given up, but the next is asked too.
        """
        addresses = list({*self._seeds, *self._nodes})
        random.shuffle(addresses)
        failures: list[BaseException] = []
        asked: set[asyncio.Task[list[SlotRange]]] = set()
        try:
            while addresses or asked:
                if addresses:
                    asked.add(asyncio.create_task(self._slots(addresses.pop())))
                limit_s = DISCOVERY_SECONDS if addresses else None
                done, asked = await asyncio.wait(asked, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                failures += [failure for answer in done if (failure := answer.exception()) is not None]
                for answer in done:
                    if answer.exception() is None and (primary := self._primary(answer.result())) is not None:
                        return primary
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise _worst(failures) or exceptions.ConnectionError(f"no node of the cluster has slot {self._slot}")

    async def close(self) -> None:
        """Nothing is open: each question has a connection of its own."""

    def _primary(self, ranges: Sequence[SlotRange]) -> Address | None:
        self._nodes = {node for each in ranges for node in each.nodes}
        return next((each.nodes[0] for each in ranges if each.first <= self._slot <= each.last), None)

    async def _slots(self, address: Address) -> list[SlotRange]:
        """Raises redis.RedisError, OSError."""
        node = Redis(host=address[0], port=address[1], **self._options)
        try:
            ranges: list[Any] = await node.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
        finally:
            await node.aclose()
        return parse_ranges(ranges, address[0])


def parse_ranges(reply: Sequence[Any], asked: str) -> list[SlotRange]:
    """Parse the reply to CLUSTER SLOTS of the node at the host ``asked``."""
    return [SlotRange(first, last, [(_host(node, asked), node[1]) for node in nodes]) for first, last, *nodes in reply]


def _host(node: Sequence[Any], asked: str) -> str:
    """Host of a node [host, port, id, metadata], whose metadata Redis has since version 7.

    The host that was asked stands for one that is empty or null: the node does not know its own, or is configured to
    name none. "?" says that the node has no host name although names are wanted; its address is in the metadata.
    """
    host = node[0] or b""
    if host == b"?":
        metadata = node[3] if len(node) > 3 else []
        host = dict(zip(metadata[::2], metadata[1::2], strict=True)).get(b"ip") or b""
    return bytes(host).decode() or asked


def _worst(failures: Iterable[BaseException]) -> BaseException | None:
    """Choose a refusal, such as a wrong password, before a node that can't be reached."""
    return max(failures, key=lambda failure: isinstance(failure, _REFUSALS), default=None)
