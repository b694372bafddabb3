"""Pages in a headless Chromium."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the files of a folder; yield the address."""
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Browser:
    """A headless Chromium, commanded over two pipes by its DevTools protocol: JSON messages that a zero byte ends."""

    def __init__(self, profile: str) -> None:
        assert CHROMIUM is not None
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}")
        script = f'exec "$@" 3<&{commands} 4>&{events}'  # where Chromium expects them; sh takes one digit
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", CHROMIUM, *options, "--remote-debugging-pipe"],
            pass_fds=(commands, events),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(events)
        self._received = b""
        self._last = 0

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        self._send(method, session, parameters)
        while (answer := self._next()).get("id") != self._last:
            pass
        result: dict[str, Any] = answer["result"]
        return result

    def _send(self, method: str, session: str | None, parameters: Mapping[str, object]) -> None:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            read = os.read(self._events, 1 << 16)
            assert read, "Chromium ended"
            self._received += read
        message, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def close(self) -> None:
        try:
            if self.process.poll() is None:
                self._send("Browser.close", None, {})  # it may end before it answers
                self.process.wait(PATIENCE_S)
        finally:
            os.close(self._commands)
            os.close(self._events)
            self.process.kill()
            self.process.wait()


def text_of_page(url: str, title: str) -> str:
    """Open a page and return the text of its only `pre` once the page has this title."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, closing(Browser(profile)) as browser:
        target = browser.call("Target.createTarget", url=url)["targetId"]
        session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        script = "[document.title, document.querySelector('pre')?.textContent]"
        ends = time.monotonic() + PATIENCE_S
        while True:
            found = browser.call("Runtime.evaluate", session, expression=script, returnByValue=True)
            shown, text = found["result"].get("value", ["", ""])
            if shown == title:
                return str(text)
            assert time.monotonic() < ends, f"{url} shows {shown!r} and {text!r}"
            time.sleep(0.1)
