import logging
from collections.abc import Iterator
from io import StringIO

import pytest
import structlog


@pytest.fixture
def out() -> Iterator[StringIO]:
    """Stream for `logs.start`, whose process-wide changes are undone."""
    root, transformers = logging.getLogger(), logging.getLogger("transformers")
    before = root.handlers[:], root.level, transformers.__class__, transformers.handlers[:]
    stream = StringIO()
    yield stream
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.captureWarnings(False)
    root.handlers[:], transformers.__class__ = before[0], before[2]
    transformers.handlers[:] = before[3]
    root.setLevel(before[1])
