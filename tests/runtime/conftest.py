from collections.abc import Iterator
from io import StringIO

import pytest

from tests import logging_state


@pytest.fixture
def out() -> Iterator[StringIO]:
    """Stream for `logs.start`, whose process-wide changes are undone."""
    with logging_state.restored():
        yield StringIO()
