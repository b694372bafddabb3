"""Threads of a step's kernels, while torch's elementwise loops run on one.

torch splits an elementwise loop into one piece per thread, also inside a row. The tail of a piece takes scalar code,
whose e^x and tanh have other last bits, so a row's bits would depend on the number of rows::

    two threads    | row 0 | row 1 | row 2 : row 2 | row 3 | row 4 |
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_kernel_threads = threading.local()


def num_threads() -> int:
    """Number of threads for kernels that have the same bits on any number."""
    return getattr(_kernel_threads, "count", None) or torch.get_num_threads()


@contextmanager
def one_for_torch() -> Iterator[None]:
    """Run torch's own loops on one thread; ``num_threads`` keeps the number from before. May be nested."""
    before, outer = torch.get_num_threads(), getattr(_kernel_threads, "count", None)
    _kernel_threads.count = num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _kernel_threads.count = outer
        torch.set_num_threads(before)


@contextmanager
def all_for_torch() -> Iterator[None]:
    """Run torch on all threads within ``one_for_torch``: for a product that has the same bits on any number."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)
