from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decant.command.deployment.processes import LOST, READY, Process
from decant.command.top.figures import ROUTER, ProcessFigures, Snapshot, model_figures, process_figures, role_of
from decant.command.top.samples import History, Sample, Window

ANSWER_S = 5.0


class PageUnavailable(Exception):
    pass


class PageForbidden(PageUnavailable):
    pass


@dataclass(frozen=True)
class Target:
    """Process to read; ``address`` is that of its admin port, None while it does not listen."""

    name: str
    address: str | None
    process: Process | None = None


@dataclass
class _Watched:
    history: History
    role: str = ""
    error: str = ""
    readiness: str = ""
    requests: Mapping[str, Any] | None = None

    @property
    def window(self) -> Window | None:
        return None if self.error else self.history.window


class Reader:
    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    async def read(self, targets: Sequence[Target], title: str = "") -> Snapshot:
        known = self._watched
        self._watched = {one.name: known.get(one.name) or _Watched(History(), _role_in(one.name)) for one in targets}
        await asyncio.gather(*(self._read_one(one, self._watched[one.name]) for one in targets))
        return self._snapshot(targets, title)

    def error(self, target: Target) -> str:
        return self._watched[target.name].error

    async def _read_one(self, target: Target, watched: _Watched) -> None:
        if target.address is None:
            watched.error = "no admin port"
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                text = (await get(target.address, "/metrics")).decode()
                sample = Sample.parse(time.monotonic(), text)
                watched.readiness = (await get(target.address, "/ready", only_ok=False)).decode().strip()
                watched.role = role_of(sample) or watched.role
                if watched.role == ROUTER:
                    watched.requests = await _requests(target.address)
        except PageUnavailable as error:
            watched.error = str(error)
        except TimeoutError:
            watched.error = f"no answer within {ANSWER_S:g} s"
        except (ValueError, RecursionError):
            watched.error = "not an admin port of Decant"
        else:
            watched.error = ""
            watched.history.add(sample)

    def _snapshot(self, targets: Sequence[Target], title: str) -> Snapshot:
        processes, requests, in_flight, routers = [], [], 0, []
        for target in targets:
            watched = self._watched[target.name]
            window = watched.window
            figures = process_figures(watched.role, window) if window is not None else None
            state = _state(target, watched)
            processes.append(ProcessFigures(target.name, watched.role, target.address or "", state, figures))
            if window is None or watched.role != ROUTER:
                continue
            routers.append(window)
            if watched.requests is None:
                open_requests = ("decant_requests_running", "decant_requests_waiting")
                in_flight += round(sum(map(window.last.total, open_requests)))
            else:
                in_flight += watched.requests["total"]
                requests += [{"router": target.name, **one} for one in watched.requests["requests"]]
        requests.sort(key=lambda one: -one["age_s"])
        return Snapshot(title, processes, model_figures(routers), requests, in_flight)


def _role_in(name: str) -> str:
    role = name.rpartition("-")[0]
    return role if role in (ROUTER, "prefill", "decode") else ""


def _state(target: Target, watched: _Watched) -> str:
    process = target.process
    if process is not None and (process.state == LOST or not process.is_ready):
        return process.describe()
    if watched.error and target.address is not None:  # a gateway is ready without an admin port
        return f"no answer: {watched.error}"
    return watched.readiness or READY


async def _requests(address: str) -> Mapping[str, Any] | None:
    """Requests of a router on this machine; None for another one, which does not list them."""
    try:
        page = await get(address, "/requests")
    except PageForbidden:
        return None
    listed: Mapping[str, Any] = json.loads(page)
    return listed


async def get(address: str, path: str, *, only_ok: bool = True) -> bytes:
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
    except OSError as error:
        number = error.errno or 0
        raise PageUnavailable(os.strerror(number) if number > 0 else str(error)) from None
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if head.startswith(b"HTTP/1.") and status == [b"403"]:
        raise PageForbidden("only for callers on its machine")
    if not head.startswith(b"HTTP/1.") or (only_ok and status != [b"200"]):
        raise PageUnavailable("not an admin port of Decant")
    return body
