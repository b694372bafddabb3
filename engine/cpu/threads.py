"""How many threads a step's kernels take, while torch's own loops run on one.

torch cuts an elementwise loop into as many pieces as there are threads, wherever the cuts fall. What is left of a
piece after its last whole vector goes through scalar code, whose e^x, tanh and all that is made of them have other
last bits::

    two threads    | row 0 | row 1 | row 2 : row 2 | row 3 | row 4 |    where the cut falls, the number of rows says

So a row's bits would depend on how many rows are beside it. On one thread the only end is that of the last row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_told = threading.local()


def team() -> int:
    """Threads for what has the same bits on any number of them."""
    return getattr(_told, "count", None) or torch.get_num_threads()


@contextmanager
def one_for_torch() -> Iterator[None]:
    """Until the block ends torch's own loops have one thread of those that it was told of. May be nested."""
    before, told = torch.get_num_threads(), getattr(_told, "count", None)
    _told.count = team()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _told.count = told
        torch.set_num_threads(before)


@contextmanager
def all_for_torch() -> Iterator[None]:
    """Within ``one_for_torch``: a product of torch's that is shown to have the same bits on all of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(team())
    try:
        yield
    finally:
        torch.set_num_threads(before)
