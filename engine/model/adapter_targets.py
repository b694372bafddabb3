"""What all devices do alike for adapters: find the layers that can be changed, and read changes that fit them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from decant.engine.checkpoint.adapter import Adapter, LowRank, read
from decant.engine.errors import AdapterRefused
from decant.engine.model.decoder_layer import Forward, FusedLayer
from decant.engine.model.step_batch import FlatBatch, Ints

Layer = TypeVar("Layer", bound=nn.Module)


class AdapterTargets:
    """Linear layers of a model that adapters can change: ``shapes`` [out, in] of their weights, by name."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, int]]) -> None:
        self._names = frozenset(name for name, _ in model.named_modules())
        self._shapes = shapes

    def read(self, name: str, folder: Path) -> Adapter:
        """Read the folder of an adapter that fits the model. Raises AdapterRefused."""
        adapter = read(name, folder)
        for module, change in adapter.changes.items():
            self._check(name, module, change)
        missing = sorted(each for each in self._shapes.keys() - adapter.changes if adapter.config.changes(each))
        if missing:
            reason = f"it lacks the matrices of {len(missing)} of its target modules, {missing[0]} among them"
            raise AdapterRefused(name, reason)
        return adapter

    def _check(self, name: str, module: str, change: LowRank) -> None:
        if module not in self._names:
            raise AdapterRefused(name, f"it changes {module}, which the model does not have")
        if (shape := self._shapes.get(module)) is None:
            reason = "which is no linear layer that computes each token once (such as those of experts)"
            raise AdapterRefused(name, f"it changes {module}, {reason}: this is not served")
        if shape != change.shape:
            reason = f"its change of {module} is {list(change.shape)}, and the model's weight {list(shape)}"
            raise AdapterRefused(name, reason)


def scaled(
    name: str, module: str, change: LowRank, dtype: torch.dtype, panel: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return down and scaled up in ``dtype``, with zeros up to a rank that is a multiple of ``panel``.

    Raises AdapterRefused.
    """
    missing = -change.rank % panel
    down = nn.functional.pad(change.down.float(), (0, 0, 0, missing)).to(dtype)
    up = nn.functional.pad(change.up.float() * change.scaling, (0, missing)).to(dtype)
    if not bool(up.isfinite().all() and down.isfinite().all()):
        raise AdapterRefused(name, f"{module}, scaled by {change.scaling:g}, is not finite in {dtype}")
    return down, up


def positions_of(flat: FlatBatch, digest: str) -> Ints:
    """Flattened positions of the rows with an adapter."""
    spans = zip(flat.rows, flat.firsts.tolist(), flat.stops.tolist(), strict=True)
    return np.concatenate([np.arange(first, stop) for row, first, stop in spans if row.request.adapter == digest])


@contextmanager
def replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Give modules other forwards for a while."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own


def find_targets(
    model: nn.Module, layers: Mapping[str, Layer], run: Callable[[], object], tokens: int
) -> Mapping[str, Layer]:
    """Return those of the linear ``layers``, by name, that get each of the ``tokens`` tokens of a step exactly once.

    ``run`` computes such a step, and keeps fewer of them. Those of experts get other rows, the head gets only rows
    that are kept.
    """
    rows: dict[str, list[int]] = {name: [] for name in layers}

    def recording(name: str, forward: Forward) -> Forward:
        def record(x: torch.Tensor) -> torch.Tensor:
            rows[name].append(x.numel() // x.shape[-1])
            out: torch.Tensor = forward(x)
            return out

        return record

    recorders: dict[nn.Module, Forward] = {module: recording(name, module.forward) for name, module in layers.items()}
    forwards = {module: module.forward for module in model.modules()}
    unfused = {module: each.original_forward for module, each in forwards.items() if isinstance(each, FusedLayer)}
    with replaced(recorders), replaced(unfused):
        run()
    return {name: layers[name] for name, counts in rows.items() if counts == [tokens]}
