from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass

from decant import models
from decant.command.errors import CommandFailed
from decant.command.up import peers, resources
from decant.command.up.options import UpOptions
from decant.command.up.peers import PeerCredentials
from decant.gateway.settings import GatewaySettings
from decant.router.settings import RouterSettings
from decant.runtime import host_memory
from decant.runtime.cores import available_cores, usable_cores
from decant.runtime.serving.server_settings import is_every_address, join_address
from decant.runtime.settings import PREFIX, Settings, variable_name
from decant.runtime.settings_sources import CLIENT_VARIABLES, load
from decant.worker.settings import WorkerSettings

_DIFFERS = {
    variable_name(name) for name in ("id", "port", "admin_port", "admin_host", "advertise", "config", "threads")
}
"""Refused in the environment."""

WORKER_NICENESS = 5
"""Of workers, which fill their cores with computing: a router that shares a core answers first, and Redis too."""

GATEWAY, SMG = "gateway", "openai"
"""Names of the processes that serve HTTP: Decant's own gateway, and smg. Each is the option of its port too."""
_MODULES = {GATEWAY: "decant.gateway", SMG: "decant.command.up.openai_gateway"}
_NOT_OF_SMG = tuple(variable_name(name) for name in ("credentials", "tls_certificate"))

_ADMIN = ("--admin-host", "127.0.0.1", "--admin-port", "0")
"""Listens on loopback: the port has neither TLS nor credentials."""


@dataclass(frozen=True)
class Spec:
    """Process to start; `port` 0 is a free one, empty `cores` are all, `niceness` is beyond that of `decant up`."""

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    port: int = 0
    cores: tuple[int, ...] = ()
    niceness: int = 0

    @property
    def command(self) -> tuple[str, ...]:
        # -P: modules in the user's current folder are not imported.
        return (sys.executable, "-P", "-m", self.module, "--port", str(self.port), *self.arguments)


@dataclass(frozen=True)
class Plan:
    workers: tuple[Spec, ...]
    routers: tuple[Spec, ...]
    redis_url: str
    reached_at: str  # host under which commands on this machine reach the routers
    ready_seconds: float
    drain_seconds: float
    facts: Mapping[str, object]
    peers: PeerCredentials | None = None
    """None: created for this run."""
    kv_bytes: int = 0  # of each worker
    gateways: tuple[Spec, ...] = ()
    """Their arguments end with an option whose value, the addresses of the routers, their start gives."""


def make_plan(options: UpOptions, redis_url: str, environ: Mapping[str, str] | None = None) -> Plan:
    """Make a plan; settings are parsed as each process does, to find errors early. Raises InvalidSettings and
    CommandFailed.
    """
    environment = dict(os.environ if environ is None else environ)
    _check_variables(environment, has_gateway=options.gateway is not None)
    workers = _workers(options, redis_url, environment)
    routers = _routers(options, redis_url, environment)
    settings: list[RouterSettings | WorkerSettings] = [_load(RouterSettings, spec) for spec in routers]
    settings += [_load(WorkerSettings, spec) for spec in workers]
    kv_bytes = next(one.kv_bytes for one in settings if isinstance(one, WorkerSettings))
    assert kv_bytes is not None, "each worker gets a share"
    return Plan(
        workers=tuple(workers),
        routers=tuple(routers),
        redis_url=redis_url,
        reached_at=_reached_at(options.host),
        ready_seconds=options.ready_seconds,
        drain_seconds=max(one.drain_seconds for one in settings),
        facts={
            "model": model_of(options),
            "kv_bytes_each": kv_bytes,
            "cores": {spec.name: list(spec.cores) for spec in workers},
        },
        peers=peers.from_environment(environment),
        kv_bytes=kv_bytes,
        gateways=_gateways(options, environment, max(one.drain_seconds for one in settings)),
    )


def _reached_at(host: str) -> str:
    if not is_every_address(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def _workers(options: UpOptions, redis_url: str, environment: Mapping[str, str]) -> list[Spec]:
    names = [(f"prefill-{n}", "decant.prefill_worker") for n in range(1, options.prefill + 1)]
    names += [(f"decode-{n}", "decant.decode_worker") for n in range(1, options.decode + 1)]
    if not names:
        raise CommandFailed("--prefill and --decode: at least one worker in all, got none", status=2)
    cores, at_once = usable_cores(), available_cores()
    own = _only(environment, WorkerSettings, peers.OF_PEERS | peers.OF_SERVERS)
    if len(names) > at_once:  # a spinning barrier would wait for a thread that does not run
        own.setdefault("GOMP_SPINCOUNT", "0")
    where = ("--redis-url", redis_url, "--host", "127.0.0.1", "--log-format", "json", *_ADMIN)
    common = (*where, "--model", model_of(options), "--dtype", options.dtype)
    memory = ("--kv-bytes", str(_kv_bytes(options, len(names))))
    adapters = ["--adapters", ",".join(options.adapters)] if options.adapters else []
    if options.adapter_memory is not None:
        adapters += "--adapter-memory", str(resources.parse_size(options.adapter_memory, "--adapter-memory"))
    return [
        Spec(
            name=name,
            module=module,
            arguments=("--id", _id(options, name), "--threads", str(len(share)), *common, *memory, *adapters),
            environment=own,
            # With a quota any core may run them: other containers of the machine would choose the same ones.
            cores=share if at_once == len(cores) else (),
            niceness=WORKER_NICENESS,
        )
        for (name, module), share in zip(names, resources.divide_cores(cores[:at_once], len(names)), strict=True)
    ]


def _routers(options: UpOptions, redis_url: str, environment: Mapping[str, str]) -> list[Spec]:
    if options.port + options.router - 1 > 65535:
        raise CommandFailed(f"--port: at most {65536 - options.router}, got {options.port}", status=2)
    return [
        Spec(
            name=f"router-{n + 1}",
            module="decant.router",
            arguments=(
                *("--id", _id(options, f"router-{n + 1}"), "--redis-url", redis_url, "--host", options.host),
                *("--models", model_of(options), "--log-format", "json", *_ADMIN),
            ),
            environment=_only(environment, RouterSettings, peers.OF_PEERS),
            port=options.port + n if options.port else 0,
        )
        for n in range(options.router)
    ]


def _gateways(options: UpOptions, environment: Mapping[str, str], drain_seconds: float) -> tuple[Spec, ...]:
    arguments = ("--host", options.host, "--drain-seconds", f"{drain_seconds:g}")
    specs = []
    if options.gateway is not None:
        if "DECANT_TLS_CERTIFICATE" in environment and "DECANT_CA" not in environment:
            text = "set DECANT_CA to the roots of DECANT_TLS_CERTIFICATE, for the gateway's calls of the routers"
            raise CommandFailed(f"--gateway: {text}", status=2)
        own = _only(environment, GatewaySettings, frozenset())
        last = (*arguments, "--log-format", "json", "--address")
        specs.append(Spec(GATEWAY, _MODULES[GATEWAY], last, own, options.gateway))
    if options.openai is not None:
        for name in _NOT_OF_SMG:
            if name in environment:
                raise CommandFailed(f"--openai: unset {name}; smg sends routers neither TLS nor secrets", status=2)
        own = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
        specs.append(Spec(SMG, _MODULES[SMG], (*arguments, "--routers"), own, options.openai))
    return tuple(specs)


def _id(options: UpOptions, name: str) -> str:
    """Return an id that is unique among deployments with a common Redis."""
    return name if options.redis_url is None else f"{name}@{os.uname().nodename}:{os.getpid()}"


def model_of(options: UpOptions) -> str:
    return str(models.path()) if options.model is None else options.model


def _kv_bytes(options: UpOptions, workers: int) -> int:
    if options.kv_memory is not None:
        return resources.parse_size(options.kv_memory)
    weights = resources.weights_size(model_of(options), options.dtype)
    return resources.kv_share(host_memory.available_memory(), weights, workers)


def _check_variables(environment: Mapping[str, str], *, has_gateway: bool) -> None:
    known = _names(RouterSettings) | _names(WorkerSettings) | CLIENT_VARIABLES
    if has_gateway:
        known |= _names(GatewaySettings)
    for name in sorted(environment):
        if name in _DIFFERS:
            raise CommandFailed(f"{name}: unset; `decant up` sets it for each process", status=2)
        if name.startswith(PREFIX) and name not in known:
            raise CommandFailed(f"{name}: no process has such a variable", status=2)


def _only(environment: Mapping[str, str], kind: type[Settings], without: Set[str]) -> dict[str, str]:
    names = _names(kind) - without
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX) or name in names}


def _names(kind: type[Settings]) -> set[str]:
    return {variable_name(name) for name in kind.model_fields}


def _load(kind: type, spec: Spec) -> RouterSettings | WorkerSettings:
    settings: RouterSettings | WorkerSettings = load(
        kind, ("--port", str(spec.port), *spec.arguments), spec.environment
    )
    return settings


def address_of(plan: Plan, port: int) -> str:
    return join_address(plan.reached_at, port)
