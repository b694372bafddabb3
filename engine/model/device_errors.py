from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from decant.engine.errors import DeviceFailed

DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""RuntimeErrors that no model causes."""


@contextmanager
def translate_device_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceFailed(f"the memory of the device is exhausted: {_first_line(error)}") from error
    except torch.AcceleratorError as error:
        raise DeviceFailed(f"the device is lost: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
