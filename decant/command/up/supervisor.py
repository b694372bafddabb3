"""All processes of a deployment.

workers start -> ready -> routers start -> ready -> gateways, recorded ---- a signal ----> gateways, then routers, then
     |                         |                     |   ^  one ended                       workers end
     '-- one ended: all end ---'                     '---'  it is restarted                       '-- a second signal:
                                                                                                      all are killed
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from decant.command.deployment.deployments import Deployment, DeploymentRecord
from decant.command.deployment.processes import Process
from decant.command.errors import CommandFailed
from decant.command.up import peers
from decant.command.up.child import Child
from decant.command.up.output import Output
from decant.command.up.peers import PeerCredentials
from decant.command.up.plan import Plan, Spec, address_of
from decant.runtime.backoff import Backoff
from decant.runtime.serving.shutdown import Shutdown, race
from decant.runtime.settings import variable_name
from decant.runtime.telemetry import logs

RESTART_BACKOFF = Backoff(0.5, 30.0)
STEADY_S = 60.0
"""A process that ran so long restarts without backoff."""
BEYOND_DRAIN_S = 15.0
"""Time from the end of the drain of a process until it is killed."""

# -SIGTERM: before the process installed its signal handler.
_GRACEFUL_STATUSES = (0, -signal.SIGTERM)

_log = logs.get("up")


class StartFailed(Exception):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Supervisor:
    def __init__(self, plan: Plan, output: Output) -> None:
        self._plan = plan
        self._output = output
        self._children: dict[str, Child] = {}
        self._restarters: list[asyncio.Task[None]] = []
        self._shutdown = Shutdown()
        self._record = DeploymentRecord()
        self._peers: PeerCredentials
        self._router_names = {spec.name for spec in plan.routers}
        self._gateway_names = {spec.name for spec in plan.gateways}
        self._lost_at: dict[str, float] = {}
        self._has_started = False
        self._is_ending = False
        self._began = time.time()
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """Run the deployment until it ends; return 0 after a graceful end. Raises StartFailed."""
        self._shutdown.on_signals()
        with self._record:
            self._peers = self._plan.peers or peers.make(self._record.temporary / "peers")
            recording = asyncio.create_task(self._write_changes())
            try:
                await race(self._serve(), self._shutdown.wait_requested())
                return await race(self._drain(), self._forced())
            finally:
                await self._end()
                recording.cancel()

    async def _serve(self) -> None:
        _log.info("starting", **self._plan.facts)
        self._write_record()
        try:
            async with asyncio.timeout(self._plan.ready_seconds):
                await self._start_all(self._plan.workers)
                await self._start_all(self._plan.routers)
                await self._start_all([self._with_routers(spec) for spec in self._plan.gateways])
        except TimeoutError:
            unready = ", ".join(child.spec.name for child in self._children.values() if not child.is_ready)
            raise StartFailed(f"{unready}: not ready within {self._plan.ready_seconds:g} s", 1) from None
        self._has_started = True
        self._write_record()
        _log.info("ready", address=", ".join(self._addresses()), **self._gateway_urls())
        await asyncio.gather(*self._restarters)

    async def _start_all(self, specs: Sequence[Spec]) -> None:
        started = [await self._start(spec) for spec in specs]
        await asyncio.gather(*(self._ready(child) for child in started))
        self._restarters += [asyncio.create_task(self._restart_when_ended(child)) for child in started]

    async def _start(self, spec: Spec) -> Child:
        shared = {"TMPDIR": str(self._record.temporary), **self._credentials_of(spec)}
        own = replace(spec, environment={**spec.environment, **shared})
        self._children[spec.name] = child = await Child.start(own, self._output, self._changed.set)
        self._changed.set()
        return child

    def _credentials_of(self, spec: Spec) -> Mapping[str, str]:
        if spec.name in self._router_names:
            return self._peers.of_router()
        return {} if spec.name in self._gateway_names else self._peers.of_worker()

    async def _ready(self, child: Child) -> None:
        if not await child.ready():
            status = await child.ended()
            detail = child.recent_output or f"ended with {status} before it was ready"
            raise StartFailed(f"{child.spec.name}: {detail}", 2 if status == 2 else 1)

    async def _restart_when_ended(self, child: Child) -> None:
        failures = 0
        while True:
            since = time.monotonic()
            status = await child.ended()
            self._lost_at[child.spec.name] = time.time()
            failures = 1 if time.monotonic() - since > STEADY_S else failures + 1
            backoff = RESTART_BACKOFF.seconds(failures)
            _log.warning("process ended", name=child.spec.name, status=status, restart_in_seconds=backoff)
            await asyncio.sleep(backoff)
            child = await self._start_again(child)
            if await child.ready():
                self._lost_at.pop(child.spec.name, None)
                self._changed.set()

    async def _start_again(self, child: Child) -> Child:
        """Start a process in place of one that ended, also if the system can't start one for a while."""
        failures = 0
        while True:
            try:
                return await self._start(self._restart_spec(child))
            except OSError as error:
                failures += 1
                name, backoff = child.spec.name, RESTART_BACKOFF.seconds(failures)
                _log.error("process can't be started", name=name, reason=str(error), retry_in_seconds=backoff)
                await asyncio.sleep(backoff)

    def _restart_spec(self, child: Child) -> Spec:
        """Return the spec of a restart: a router or gateway keeps its port, a worker registers a new one."""
        keeps_port = self._router_names | self._gateway_names
        if child.spec.name in keeps_port and child.address is not None:
            return replace(child.spec, port=int(child.address.rpartition(":")[2]))
        return child.spec

    async def _write_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._output.update(self._processes())
            try:
                self._write_record()
            except CommandFailed as error:
                _log.warning("the deployment's record can't be written", reason=str(error))

    def _write_record(self) -> None:
        deployment = Deployment(
            os.getpid(),
            self._addresses(),
            self._plan.redis_url,
            asdict(self._peers),
            self._processes(),
            self._has_started,
            self._began,
            self._is_ending,
        )
        self._record.write(deployment)

    def _processes(self) -> dict[str, Process]:
        return {
            name: replace(child.process, lost_at=self._lost_at.get(name, child.process.lost_at))
            for name, child in self._children.items()
            if child.running or not self._is_ending
        }

    def _addresses(self) -> tuple[str, ...]:
        routers = [self._children[spec.name] for spec in self._plan.routers if spec.name in self._children]
        ports = [child.address.rpartition(":")[2] for child in routers if child.address]
        return tuple(address_of(self._plan, int(port)) for port in ports)

    def _with_routers(self, gateway: Spec) -> Spec:
        return replace(gateway, arguments=(*gateway.arguments, ",".join(self._addresses())))

    def _gateway_urls(self) -> dict[str, str]:
        """Base URLs for OpenAI's clients, as `gateway_url` and `openai_url`."""
        return {f"{spec.name}_url": self._url(spec) for spec in self._plan.gateways}

    def _url(self, spec: Spec) -> str:
        scheme = "https" if variable_name("https_certificate") in spec.environment else "http"
        return f"{scheme}://{self._children[spec.name].address}/v1"

    async def _drain(self) -> int:
        self._is_ending = True
        self._changed.set()
        await self._stop_restarts()
        plan = self._plan
        stopped = [await self._stop(specs) for specs in (plan.gateways, plan.routers, plan.workers)]
        return 0 if all(stopped) else 1

    async def _stop(self, specs: Sequence[Spec]) -> bool:
        children = [self._children[spec.name] for spec in specs if spec.name in self._children]
        ending = {asyncio.create_task(child.ended()): child for child in children if child.running}
        for child in ending.values():
            child.terminate()
        if not ending:
            return True
        limit = self._plan.drain_seconds + BEYOND_DRAIN_S
        ended, timed_out = await asyncio.wait(ending, timeout=limit)
        for one in timed_out:
            _log.error("killed after the drain timeout", name=ending[one].spec.name, limit_seconds=limit)
            ending[one].kill()
        cut_off = [ending[one].spec.name for one in ended if one.result() not in _GRACEFUL_STATUSES]
        if cut_off:
            _log.error("did not end gracefully", names=sorted(cut_off))
        return not timed_out and not cut_off

    async def _forced(self) -> int:
        await self._shutdown.wait_forced()
        return 1

    async def _stop_restarts(self) -> None:
        for restarter in self._restarters:
            restarter.cancel()
        if self._restarters:
            await asyncio.wait(self._restarters)

    async def _end(self) -> None:
        await self._stop_restarts()
        children = list(self._children.values())
        for child in children:
            if child.running:
                child.kill()
        await asyncio.gather(*(child.ended() for child in children))
