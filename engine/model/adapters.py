"""Adapters of a device: which it has, and the steps that compute with them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from decant.engine.errors import AdapterRefused
from decant.engine.model.step_batch import FlatBatch
from decant.engine.plan import Adapters, PreparedAdapter


class ModelAdapters(Adapters, Protocol):
    """Adapters of a model. A backend makes one for the model that it prepared."""

    def applied(self, flat: FlatBatch) -> AbstractContextManager[object]:
        """Context of a step, in which rows of requests with an adapter are computed with it."""
        ...


class NoAdapters:
    """Of a model that is loaded without adapters."""

    def load(self, name: str, folder: Path) -> PreparedAdapter:
        raise AdapterRefused(name, "the model was loaded without adapters")

    def add(self, prepared: PreparedAdapter) -> None:
        raise AssertionError("no adapter was loaded")

    def remove(self, digest: str) -> None:
        pass

    def __contains__(self, digest: object) -> bool:
        return False

    def applied(self, flat: FlatBatch) -> AbstractContextManager[object]:
        return nullcontext()


NO_ADAPTERS = NoAdapters()


def adapters_of(flat: FlatBatch) -> Sequence[str]:
    """Digests of the adapters in a step, each once."""
    return list(dict.fromkeys(row.request.adapter for row in flat.rows if row.request.adapter))
