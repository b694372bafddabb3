from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.live import Live

from decant.command.deployment import deployments
from decant.command.errors import CommandFailed
from decant.command.top.figures import Snapshot
from decant.command.top.pages import Reader, Target
from decant.command.top.screen import render

_NO_TERMINAL = 140  # columns


@dataclass(frozen=True)
class TopOptions:
    addresses: tuple[str, ...] = ()
    once: bool = False
    interval: float = 1.0
    as_json: bool = False


def run(options: TopOptions) -> None:
    asyncio.run(_run(options))


async def _run(options: TopOptions) -> None:
    targets_now = _explicit(options.addresses) if options.addresses else _local()
    reader = Reader()
    targets, title = targets_now()
    snapshot = await reader.read(targets, title)
    if options.addresses and all(reader.error(one) for one in targets):
        raise CommandFailed("; ".join(f"{one.address}: {reader.error(one)}" for one in targets))
    with _output(options) as show:
        if not options.once:
            show(snapshot)
        while True:
            await asyncio.sleep(options.interval)
            targets, title = targets_now()
            show(await reader.read(targets, title))
            if options.once:
                return


def _explicit(addresses: Sequence[str]) -> Callable[[], tuple[list[Target], str]]:
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise CommandFailed(f"ADDRESS: host:port of an admin port, got {address}", status=2)
    targets = [Target(address, address) for address in dict.fromkeys(addresses)]
    return lambda: (targets, f"{len(targets)} admin ports")


def _local() -> Callable[[], tuple[list[Target], str]]:
    pid = deployments.latest("addresses of admin ports").pid

    def now() -> tuple[list[Target], str]:
        deployment = deployments.of(pid)
        if deployment is None:
            raise CommandFailed(f"the deployment of `decant up` (process {pid}) has ended")
        targets = [
            Target(name, None if one.admin_port is None else f"127.0.0.1:{one.admin_port}", one)
            for name, one in deployment.processes.items()
        ]
        state = "ending" if deployment.is_ending else "ready" if deployment.has_started else "starting"
        return targets, f"`decant up` {pid}: {state}"

    return now


@contextlib.contextmanager
def _output(options: TopOptions) -> Iterator[Callable[[Snapshot], None]]:
    if options.as_json:
        yield lambda snapshot: print(json.dumps(document(snapshot)), flush=True)
        return
    console = Console() if sys.stdout.isatty() else Console(width=_NO_TERMINAL)
    if options.once or not console.is_terminal:
        yield lambda snapshot: console.print(render(snapshot, console.width, None))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda snapshot: live.update(render(snapshot, console.width, console.height), refresh=True)


def document(snapshot: Snapshot) -> dict[str, object]:
    return {"at": round(time.time(), 3), **asdict(snapshot)}
