from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class EventSource(Generic[T]):
    """Source of one kind of event. Each event goes to all subscribers before `publish` returns.

    Its owner alone publishes. No subscriber may depend on the order of subscribers.
    """

    def __init__(self) -> None:
        self._subscribers: list[Callable[[T], object]] = []

    def subscribe(self, subscriber: Callable[[T], object]) -> None:
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Callable[[T], object]) -> None:
        self._subscribers.remove(subscriber)

    def publish(self, event: T) -> None:
        for subscriber in tuple(self._subscribers):
            subscriber(event)
