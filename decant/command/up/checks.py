"""Checks before a process starts, without torch.

Of a hub model without local weights only the small files are downloaded.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from decant.command.errors import CommandFailed
from decant.command.up import resources
from decant.command.up.listeners import listener
from decant.command.up.options import UpOptions
from decant.command.up.plan import GATEWAY, SMG, Plan, model_of
from decant.engine.checkpoint import model_types, weight_files
from decant.engine.errors import ModelRefused
from decant.plan.quantities import show_bytes
from decant.router.text.served_model import served
from decant.runtime import host_memory
from decant.runtime.connections import tls
from decant.runtime.connections.tls import PeerTls
from decant.runtime.model_files import ModelUnreadable, find, local_folder
from decant.runtime.settings import SettingError, variable_name
from decant.state.errors import StateError
from decant.state.store import Store, StoreSettings

_PACKAGES = {GATEWAY: ("starlette", "uvicorn", "httptools"), SMG: ("smg",)}
"""Packages of the extra that has the name of the process."""


def check_model(options: UpOptions) -> None:
    model = model_of(options)
    if not model:
        raise CommandFailed("--model: a folder, a GGUF file or a hub name, got ''", status=2)
    is_there = Path(model).exists()
    if not is_there and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise CommandFailed(f"--model: no such folder: {model}", status=2)
    try:
        if is_there:
            weight_files.check(local_folder(model) or Path(model))
        files = find(model)
        config = weight_files.read_config(files.folder)
        weight_files.check_format(files.folder, config)
        model_types.check(model, config)
        served(files)
    except (ModelRefused, ModelUnreadable) as error:
        raise CommandFailed(f"--model: {error}", status=2) from None


def check_peers(plan: Plan) -> None:
    if plan.peers is None:
        return
    try:
        tls.check_peers(PeerTls(**{f"peer_{name}": value for name, value in asdict(plan.peers).items()}))
    except SettingError as error:
        text = f"{variable_name(error.field)}: {error.limit}, got {error.value}"
        raise CommandFailed(text, status=2) from None


def check_memory(options: UpOptions, plan: Plan) -> None:
    weights = resources.weights_size(model_of(options), options.dtype)
    needed = len(plan.workers) * (weights + plan.kv_bytes + resources.PROCESS_BYTES)
    free = host_memory.available_memory()
    if needed > free:
        each = f"{show_bytes(weights)} of weights and {show_bytes(plan.kv_bytes)} of KV cache"
        advice = "start fewer workers, or give less with --kv-memory"
        workers = "1 worker" if len(plan.workers) == 1 else f"{len(plan.workers)} workers"
        text = f"memory: {workers} with {each} each, and {show_bytes(free)} are free; {advice}"
        raise CommandFailed(text, status=2)


def check_redis(url: str) -> None:
    try:
        asyncio.run(_ping(StoreSettings(url)))
    except StateError as error:
        raise CommandFailed(f"--redis-url: {error}", status=2) from None


async def _ping(settings: StoreSettings) -> None:
    async with Store(settings) as store:
        await store.ping()


def check_gateways(plan: Plan) -> None:
    for spec in plan.gateways:
        for package in _PACKAGES[spec.name]:
            if find_spec(package) is None:
                text = f"needs {package}: pip install 'decant-llm[{spec.name}]'"
                raise CommandFailed(f"--{spec.name}: {text}", status=2)


def check_ports(plan: Plan, host: str) -> None:
    for spec in plan.routers:
        _check_port(host.strip("[]"), spec.port, "--port")
    for spec in plan.gateways:
        _check_port(host.strip("[]"), spec.port, f"--{spec.name}")


def _check_port(host: str, port: int, option: str) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise CommandFailed(f"--host: an address of this machine, got {host} ({error.strerror})", status=2) from None
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: ports of ended processes are free
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                process = listener(port) or "another process"
                advice = f"give another {option}, or 0 for a free one"
                raise CommandFailed(f"{option}: {port} is in use by {process}; {advice}", status=2) from None
            where = "--host" if error.errno == errno.EADDRNOTAVAIL else option
            raise CommandFailed(f"{where}: can't listen on {host}:{port}: {error.strerror}", status=2) from None
