"""The configuration of logs, which belongs to the process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def restored() -> Iterator[None]:
    """Undo what `logs.start` changes in this process."""
    root, transformers = logging.getLogger(), logging.getLogger("transformers")
    before = root.handlers[:], root.level, transformers.__class__, transformers.handlers[:]
    try:
        yield
    finally:
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
        logging.captureWarnings(False)
        root.handlers[:], transformers.__class__ = before[0], before[2]
        transformers.handlers[:] = before[3]
        root.setLevel(before[1])
