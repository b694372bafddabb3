from __future__ import annotations

from collections.abc import Callable
from functools import partial

from decant.engine.backends import choose_backend
from decant.engine.checkpoint import checkpoint
from decant.engine.checkpoint.coded_linear import coded_digest, round_rows
from decant.engine.checkpoint.quantize import Quantization, quantize
from decant.engine.checkpoint.weight_format import PLAIN
from decant.engine.errors import InvalidConfig
from decant.engine.kv_layout import KvLayout
from decant.engine.library_errors import refuse_model_on_error, translate_device_errors
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
    if config.quantize is not None:
        _check_quantize(config.quantize, source, backend)
    if config.activations != "auto" and not backend.rounds_rows:
        limit = f"auto on the device {backend.device}: CPUs alone multiply rows of int8"
        raise InvalidConfig("activations", limit, config.activations)
    dtype = source.choose_dtype(config.dtype, backend.dtypes)
    context_length = source.choose_context_length(config.context_length)
    weights = source.weights()
    progress(HASHED)
    model = source.read(
        dtype,
        backend.device,
        load_to_device=backend.loads_to_device,
        keep_codes=backend.keeps_codes,
    )
    if config.quantize is not None:
        with refuse_model_on_error(source.name, "its weights can't be quantized"):
            quantize(model, config.quantize, backend.quantize_piece)
    if config.activations != "auto" and not round_rows(model):
        limit = f"auto for {source.name}, which has no weights of int8 or int4 (quantize makes them)"
        raise InvalidConfig("activations", limit, config.activations)
    progress(READ)
    codes = coded_digest(model)  # before the backend replaces them

    def layout_hash(layout: KvLayout) -> str:
        dtypes = f"{dtype} and codes {codes}" if codes else f"{dtype}"
        dtypes += "" if config.kv_dtype == "auto" else f" with KV in {config.kv_dtype}"
        dtypes += "" if config.activations == "auto" else f" with activations in {config.activations}"
        return checkpoint.layout_hash(weights, layout, context_length, dtypes, backend.identity)

    check_files = partial(weights.check_unchanged, source.name)
    quantization = config.quantize or source.weight_format.quantization
    if config.activations != "auto":
        quantization = ", ".join(filter(None, (quantization, f"activations {config.activations}")))
    read = ReadModel(model, source.name, context_length, layout_hash, check_files, quantization)
    return make_device(read, config, backend, progress)


def _check_quantize(quantization: Quantization, source: checkpoint.Checkpoint, backend: Backend) -> None:
    if not backend.keeps_codes:
        raise InvalidConfig(
            "quantize", f"unset on the device {backend.device}, which has no such products", quantization
        )
    if source.weight_format is not PLAIN:
        raise InvalidConfig("quantize", f"unset for {source.name}, whose weights are quantized already", quantization)
