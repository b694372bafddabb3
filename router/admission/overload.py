"""Refusal of requests that would have to wait behind too many, or for longer than they may."""

from __future__ import annotations

from decant.router.execution.execution import RETRY_SECONDS, RouterServices
from decant.runtime.channel import Deadline
from decant.runtime.errors import QueueFull

WAIT_SHARE = 0.75
"""Of the time until a request's deadline: what it may wait, as predicted. The rest is for its answer."""


def check_wait(router: RouterServices, model: str, priority: int, deadline: Deadline) -> None:
    """Raises QueueFull, with the predicted wait, for a new request that is to be refused now."""
    settings, predicted = router.settings, router.pool.waits[model].predicted(priority)
    waiting = router.admission.waiting + sum(map(len, router.pool.lines.values()))
    if waiting >= settings.queue_limit:
        raise QueueFull(settings.queue_limit, retry_after=max(predicted, RETRY_SECONDS))
    left = deadline.remaining()
    if left is not None and predicted > WAIT_SHARE * left:
        words = f"a wait of {predicted:.1f} s is predicted, too long for a deadline in {left:.1f} s"
        raise QueueFull(words, retry_after=predicted)
    if predicted > settings.max_queue_seconds:
        words = f"a wait of {predicted:.1f} s is predicted, at most {settings.max_queue_seconds:g} s are allowed"
        raise QueueFull(words, retry_after=predicted)
