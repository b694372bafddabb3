from __future__ import annotations

from collections.abc import Callable
from functools import partial

from decant.engine.backends import choose_backend
from decant.engine.checkpoint import checkpoint
from decant.engine.kv_layout import KvLayout
from decant.engine.library_errors import translate_device_errors
from decant.engine.model.backend import Backend
from decant.engine.model.model import ModelConfig, ModelDevice, ReadModel, make_device

HASHED, READ = 5, 20
"""Percent of a load, after hashing and after reading the weight files."""


@translate_device_errors()
def load(
    config: ModelConfig, progress: Callable[[int], None] = lambda percent: None, backend: Backend | None = None
) -> ModelDevice:
    """Read a checkpoint and make the device that computes it; ``progress`` gets the percent done.

    Raises ModelRefused, InvalidConfig, DeviceFailed.
    """
    progress(0)
    backend = backend or choose_backend(config)
    source = checkpoint.open(config.model, config.revision)
    dtype = source.choose_dtype(config.dtype, backend.dtypes)
    context_length = source.choose_context_length(config.context_length)
    weights = source.weights()
    progress(HASHED)
    model = source.read(dtype, backend.device, load_to_device=backend.loads_to_device)
    progress(READ)

    def layout_hash(layout: KvLayout) -> str:
        return checkpoint.layout_hash(weights, layout, context_length, dtype, backend.identity)

    check_files = partial(weights.check_unchanged, source.name)
    read = ReadModel(model, source.name, context_length, layout_hash, check_files)
    return make_device(read, config, backend, progress)
