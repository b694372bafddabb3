"""Real Redis Clusters on loopback, which begin with the file of nodes that they would otherwise agree on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis as sync_redis

from decant.state.private_redis import PrivateRedis
from tests.ports import reserved_port

PATIENCE_S = 60.0
SLOTS = 16_384
PASSWORD = "secret"


@dataclass
class RedisCluster:
    """A node counts as lost after 15 s, the default: a busy machine must not promote a replica too early."""

    nodes: Sequence[PrivateRedis]  # primaries, then one replica of the last of them, if asked for
    ports: Sequence[int]

    @property
    def url(self) -> str:
        """Its first node does not exist."""
        return f"redis+cluster://:{PASSWORD}@127.0.0.1:1,127.0.0.1:{self.ports[0]}"


def connect(node: PrivateRedis) -> sync_redis.Redis:
    return sync_redis.Redis.from_url(node.url, password=PASSWORD)


def until(holds: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


@contextmanager
def redis_cluster(primaries: int, *, has_replica: bool = False) -> Iterator[RedisCluster]:
    """Run a cluster with equal shares of the slots."""
    count = primaries + has_replica
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t")))
        ports = [stack.enter_context(reserved_port()) for _ in range(count)]
        nodes = []
        for number, port in enumerate(ports):
            file = folder / f"{number}.conf"
            lines = [_line(other, ports, primaries, is_self=other == number) for other in range(count)]
            file.write_text("\n".join([*lines, f"vars currentEpoch {count} lastVoteEpoch 0", ""]))
            options = ["--cluster-enabled", "yes", "--cluster-config-file", str(file)]
            options += ["--cluster-replica-validity-factor", "0", "--masterauth", PASSWORD]
            nodes.append(stack.enter_context(PrivateRedis(port=port, options=options)))
        for node in nodes:
            with sync_redis.Redis.from_url(node.url) as bare:
                until(lambda bare=bare: _is_ready(bare))  # type: ignore[misc]
                bare.config_set("requirepass", PASSWORD)
        yield RedisCluster(nodes, ports)


def _line(number: int, ports: Sequence[int], primaries: int, *, is_self: bool) -> str:
    """Format a node as in a node's own file: id, address, flags, primary, pings, configuration epoch, link, slots."""
    is_replica = number >= primaries
    flags = ("myself," if is_self else "") + ("slave" if is_replica else "master")
    primary = _id(primaries - 1) if is_replica else "-"
    slots = "" if is_replica else f" {SLOTS * number // primaries}-{SLOTS * (number + 1) // primaries - 1}"
    epoch = primaries if is_replica else number + 1
    address = f"127.0.0.1:{ports[number]}@{ports[number] + 10_000}"
    return f"{_id(number)} {address} {flags} {primary} 0 0 {epoch} connected{slots}"


def _id(number: int) -> str:
    return f"{number:040x}"


def _is_ready(bare: Any) -> bool:
    return bool(bare.execute_command("CLUSTER", "INFO").startswith(b"cluster_state:ok"))
