"""One request in the hands of its attempts."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.request import Course
from router.writing import Pen
from state.names import Life
from state.owned import OwnedRequest


@dataclass(slots=True)
class Job:
    """What one request keeps from one attempt to the next."""

    course: Course
    owned: OwnedRequest
    pen: Pen
    avoid: set[Life] = field(default_factory=set)
    from_tokens: bool = False
    """A handoff failed, or tokens are written: no more prefill workers."""
