from __future__ import annotations

import sys
import time
from collections.abc import Callable

from decant.command.deployment import deployments
from decant.command.deployment.deployments import Deployment
from decant.command.deployment.processes import describe_unready
from decant.command.errors import CommandFailed

STARTING_S = 60.0
POLL_S = 0.1
REPORT_S = 2.0


class Waiting:
    """Wait for a deployment, at most `seconds` in all; None is `STARTING_S`, and only for one that has a record.
    Errors name `option`; `report` receives the reason of a wait.
    """

    def __init__(
        self, option: str, seconds: float | None, report: Callable[[str], None] | None = None, poll_s: float = POLL_S
    ) -> None:
        self._option = option
        self._for_any = seconds is not None
        self._ends = time.monotonic() + (STARTING_S if seconds is None else seconds)
        self._report = report or _to_stderr
        self._last_text = ""
        self._poll_s = poll_s
        self._next_report = 0.0

    def deployment(self) -> Deployment:
        while True:
            try:
                deployment = deployments.latest(self._option)
            except CommandFailed:
                if not self._for_any or self._is_over():
                    raise
                self._pause("waiting for a deployment on this machine")
                continue
            self._for_any = False  # after this one has ended, no other is waited for
            if deployment.has_started:
                return deployment
            unready = describe_unready(deployment.processes) or "its processes start"
            text = f"`decant up` (process {deployment.pid}) is starting: {unready}"
            if self._is_over():
                raise CommandFailed(f"{text}; --wait SECONDS waits for it")
            self._pause(text)

    def for_restart(self, deployment: Deployment) -> bool:
        """Wait until all processes are ready; return False if they were, time is over or the deployment has ended."""
        waited = False
        while (current := deployments.of(deployment.pid)) is not None:
            if current.is_ending:
                raise CommandFailed(f"`decant up` (process {current.pid}) is ending")
            unready = describe_unready(current.processes)
            if not unready:
                return waited
            if self._is_over():
                return False
            waited = True
            self._pause(f"waiting for {unready}")
        return False

    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends

    def _pause(self, text: str) -> None:
        now = time.monotonic()
        if text != self._last_text and now >= self._next_report:
            self._report(text)
            self._last_text, self._next_report = text, now + REPORT_S
        time.sleep(self._poll_s)


def _to_stderr(text: str) -> None:
    print(f"decant: {text}", file=sys.stderr, flush=True)
