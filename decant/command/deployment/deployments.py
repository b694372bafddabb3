"""Records of this machine's deployments, which only their user can read.

A file is valid while it is locked; the kernel unlocks it when the process ends. A keeper (a shell at the end of a pipe)
then removes it and the temporary files.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from decant.client.channel import Tls
from decant.command.deployment.processes import Process
from decant.command.errors import CommandFailed

_PREFIX = "decant-up-"
# Again later: a process that is being killed may write in between.
_KEEPER = 'read -r _; rm -rf -- "$@" || { sleep 1; rm -rf -- "$@"; }'
_STOP_SECONDS = 5.0


@dataclass(frozen=True)
class Deployment:
    """Running deployment, as other commands see it: without `addresses` until its routers listen; `peers` are fields of
    the `Tls` for calls to its workers, `began` is wall clock in seconds.
    """

    pid: int
    addresses: tuple[str, ...]
    redis_url: str
    peers: dict[str, str | None] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    has_started: bool = True
    began: float = 0.0
    is_ending: bool = False

    @property
    def peer_tls(self) -> Tls | None:
        return Tls(**self.peers) if self.peers else None


def folder() -> Path:
    """Return the folder of records. Raises CommandFailed if there is none that can be written."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or _temporary_folder())


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise CommandFailed("TMPDIR: a folder that can be written, got none, nor can /tmp be written") from None


def running() -> list[Deployment]:
    records = (_read(path) for path in folder().glob(f"{_PREFIX}*.json"))
    return sorted((one for one in records if one is not None), key=lambda one: one.began, reverse=True)


def latest(option: str) -> Deployment:
    """Return the newest deployment, perhaps still starting. Raises CommandFailed, which names `option`."""
    deployments = running()
    if not deployments:
        raise CommandFailed(f"no deployment runs on this machine: start one with `decant up`, or give {option}")
    return deployments[0]


def of(pid: int) -> Deployment | None:
    return _read(_path(pid))


def with_redis(redis_url: str) -> Deployment | None:
    return next((one for one in running() if one.redis_url == redis_url), None)


def _path(pid: int) -> Path:
    return folder() / f"{_PREFIX}{pid}.json"


class DeploymentRecord:
    """Record and folder `temporary`, kept until the end of the ``with`` or of the process."""

    def __init__(self) -> None:
        self.path = _path(os.getpid())
        self.temporary = Path()
        self._lock: int | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    def write(self, deployment: Deployment) -> None:
        """Replace the record atomically. Raises CommandFailed."""
        new = f"{self.path}.new"
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise CommandFailed(f"{new}: {error.strerror}") from None
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(asdict(deployment)).encode())
        os.replace(new, self.path)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = descriptor

    def __enter__(self) -> Self:
        try:
            self.temporary = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_temporary_folder()))
        except OSError as error:
            raise CommandFailed(f"TMPDIR: a folder that can be written ({error.strerror})") from None
        command = ["/bin/sh", "-c", _KEEPER, "decant-keeper", str(self.path), f"{self.path}.new", str(self.temporary)]
        self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.wait(_STOP_SECONDS)


def _read(path: Path) -> Deployment | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with open(descriptor, encoding="utf-8") as file:
        if os.fstat(descriptor).st_uid != os.getuid():
            return None
        if not _is_locked(descriptor):
            return _read(path) if _is_replaced(path, descriptor) else None
        try:
            values = json.load(file)
            processes = {name: Process(**one) for name, one in values["processes"].items()}
            return Deployment(**{**values, "addresses": tuple(values["addresses"]), "processes": processes})
        except (AttributeError, KeyError, TypeError, ValueError):
            return None  # written by another version


def _is_replaced(path: Path, descriptor: int) -> bool:
    """Return whether the same process has written a newer record meanwhile."""
    with suppress(OSError):
        return not os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
