"""Who goes first.

The order of a sequence never changes: its place is the step at which it was added, moved forward by a fixed
number of steps for each level of priority. So a level is worth that many steps of waiting, two sequences never
change places, and whoever waits is in the end before everyone who comes later: nobody starves.
"""

from __future__ import annotations

STEPS_PER_PRIORITY = 256
"""Steps of waiting that one level of priority is worth."""


def order_of(step: int, arrival: int, priority: int) -> tuple[float, int]:
    """Sort key, most urgent first; ``arrival`` numbers the sequences and breaks ties."""
    return (step - priority * STEPS_PER_PRIORITY, arrival)
