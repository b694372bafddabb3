from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from decant.runtime.errors import ServiceError


class CommandFailed(Exception):
    """Failure that ends a command with `status` and one line on standard error."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def one_line_errors() -> Iterator[None]:
    try:
        yield
    except CommandFailed as error:
        _end(str(error), error.status)
    except ServiceError as error:
        _end(str(error) or error.code.name, 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _end(message: str, status: int) -> None:
    print(f"decant: {message}", file=sys.stderr)
    raise SystemExit(status) from None
