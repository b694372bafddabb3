from __future__ import annotations

from decant.router.settings import RouterSettings
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import RETRY_AFTER_SECONDS, QueueFull

WAIT_SHARE = 0.75
"""Share of the time until a request's deadline that its predicted wait may take."""


def check_wait(settings: RouterSettings, waiting: int, predicted_s: float, deadline: Deadline) -> None:
    """Raise QueueFull if too many requests wait or the predicted wait is too long."""
    if waiting >= settings.queue_limit:
        raise QueueFull(settings.queue_limit, retry_after=max(predicted_s, RETRY_AFTER_SECONDS))
    left = deadline.remaining()
    if left is not None and predicted_s > WAIT_SHARE * left:
        detail = f"a wait of {predicted_s:.1f} s is predicted, too long for a deadline in {left:.1f} s"
        raise QueueFull(detail, retry_after=predicted_s)
    if predicted_s > settings.max_queue_seconds:
        detail = f"a wait of {predicted_s:.1f} s is predicted, at most {settings.max_queue_seconds:g} s are allowed"
        raise QueueFull(detail, retry_after=predicted_s)
