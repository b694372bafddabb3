"""Passes of a model whose weights are on torch's meta device: they have shapes and no numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

META, CPU = torch.device("meta"), torch.device("cpu")
_aten = torch.ops.aten
_RANGES = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_INTEGERS = (torch.bool, torch.int32, torch.int64)
_CONSTANTS = (_aten.zeros.default, _aten.ones.default, _aten.full.default)


class MetaWeights(TorchDispatchMode):
    """Runs a pass on weights of the meta device, with one path through code that depends on numbers.

    No tensor changes its device: what follows from positions alone stays on the CPU and is computed. An element of the
    meta device is read as 1, and none of them is found to be unlike 0: of experts that a loop chooses, none runs, and
    ``skips_code`` is set.

    lookups  the indices of each look-up in an embedding, on the CPU where they are known
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lookups: list[torch.Tensor] = []
        self.skips_code = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with self:  # in inference mode, an operation arrives that consists of others
            if (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return result
        call: tuple[Any, Any] = tuple(args), dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_meta:
            if func is _aten._local_scalar_dense.default:
                return first.new_ones((), device=CPU).item()
            if func is _aten.nonzero.default:
                self.skips_code = True
                return first.new_empty((0, first.dim()), dtype=torch.long)
        if func is _aten.embedding.default:
            self.lookups.append(args[1])
        if func is _aten._to_copy.default:
            call[1]["device"] = args[0].device
        elif func in _RANGES or (func in _CONSTANTS and call[1].get("dtype") in _INTEGERS):
            call[1]["device"] = CPU
        elif any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(call)):
            call = tree_map(_to_meta, call)
        return func(*call[0], **call[1])


class UnknownLists(TorchFunctionMode):
    """Has ``tolist`` of a tensor on the meta device return zeros, which torch refuses."""

    def __init__(self, weights: MetaWeights) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.tolist and args[0].is_meta:
            self._weights.skips_code = True
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device=CPU).tolist()
        return func(*args, **(kwargs or {}))


def _to_meta(value: Any) -> Any:
    return value.to(META) if isinstance(value, torch.Tensor) else value
