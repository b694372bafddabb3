"""Run a model in float32 on the weights that it has, whatever their dtype, without a copy of them.

Comparing two ways to compute a model in bfloat16 can't distinguish an error from rounding: where a router stands near a
tie, the last bit chooses the expert, and logits differ as much as those of a wrong model. In float32 they agree or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_NARROW = (torch.bfloat16, torch.float16)


class Float32(TorchDispatchMode):
    """While entered, operations of this thread take narrower floating-point numbers as float32, and make none.

    An operation's operands are widened one operation at a time: a weight exists twice while it is multiplied. Views of
    weights stay views, and what writes to a narrow tensor still does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given: tuple[Any, Any] = tuple(args), dict(kwargs or {})
        if func is torch.ops.aten.embedding.default:  # of a table of all tokens, only a few rows are taken
            return _widen(func(*args, **(kwargs or {})))
        if not _writes_to_narrow(func, args):
            given = tree_map(_widen_dtype if func.is_view else _widen, given)
        return func(*given[0], **given[1])


def _widen_dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _NARROW else value


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _NARROW else value
    return _widen_dtype(value)


def _writes_to_narrow(func: Any, args: Sequence[Any]) -> bool:
    target = args[0] if args and func._schema.is_mutable else None
    return isinstance(target, torch.Tensor) and target.dtype in _NARROW
