from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_NARROW = (torch.bfloat16, torch.float16)


class Float32(TorchDispatchMode):
    """Runs a model in float32 on weights of any dtype, without a copy: widens this thread's narrower operands.

    In bfloat16 an error looks like rounding: near a router's tie the last bit chooses the expert. Views of weights stay
    views; writes to a narrow tensor stay narrow.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call: tuple[Any, Any] = tuple(args), dict(kwargs or {})
        if func is torch.ops.aten.embedding.default:  # widen only the rows taken
            return _widen(func(*args, **(kwargs or {})))
        if not _writes_to_narrow(func, args):
            call = tree_map(_widen_dtype if func.is_view else _widen, call)
        return func(*call[0], **call[1])


def _widen_dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _NARROW else value


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _NARROW else value
    return _widen_dtype(value)


def _writes_to_narrow(func: Any, args: Sequence[Any]) -> bool:
    target = args[0] if args and func._schema.is_mutable else None
    return isinstance(target, torch.Tensor) and target.dtype in _NARROW
