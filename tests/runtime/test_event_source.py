from __future__ import annotations

from decant.runtime.event_source import EventSource


def test_an_event_goes_to_all_that_are_subscribed_when_it_is_published() -> None:
    numbers, first, second = EventSource[int](), list[int](), list[int]()
    numbers.subscribe(first.append)
    numbers.publish(1)
    numbers.subscribe(second.append)
    numbers.publish(2)
    numbers.unsubscribe(first.append)
    numbers.publish(3)
    assert (first, second) == ([1, 2], [2, 3])


def test_a_subscriber_may_unsubscribe_while_it_gets_an_event() -> None:
    numbers, received = EventSource[int](), list[int]()

    def once(number: int) -> None:
        received.append(number)
        numbers.unsubscribe(once)

    numbers.subscribe(once)
    numbers.subscribe(received.append)
    numbers.publish(1)
    numbers.publish(2)
    assert received == [1, 1, 2]
