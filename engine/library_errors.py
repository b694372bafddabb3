"""Exceptions of torch, transformers and safetensors as those of the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from decant.engine.errors import DeviceFailed, ModelRefused

DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""RuntimeErrors that no model causes."""

FAILURES: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What a model that is not supported may raise in a load, beside ``triton_errors``."""


def triton_errors() -> tuple[type[Exception], ...]:
    """Base of the errors of triton's compiler and launches, once triton is imported. They are no RuntimeErrors."""
    errors = sys.modules.get("triton.errors")
    return () if errors is None else (errors.TritonError,)


@contextmanager
def translate_device_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceFailed(f"the memory of the device is exhausted: {_first_line(error)}") from error
    except torch.AcceleratorError as error:
        raise DeviceFailed(f"the device is lost: {_first_line(error)}") from error


@contextmanager
def refuse_model_on_error(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except DEVICE_ERRORS:
        raise
    except FAILURES + triton_errors() as error:
        text = " ".join(str(error).split())[:300]
        reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise ModelRefused(name, f"{what}: {reason}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
