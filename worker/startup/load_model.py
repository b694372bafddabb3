"""Loading and measuring of the model: the only place where a worker imports torch."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from decant.engine.costs import StepCostModel
from decant.engine.guides.compiler import GrammarCompiler
from decant.engine.kv_layout import longest_sequence
from decant.engine.plan import Device
from decant.engine.scheduler import MAX_TOKEN_BUDGET, Limits, choose_token_budget
from decant.runtime.cores import available_cores
from decant.runtime.host_memory import available_memory
from decant.runtime.model_files import ModelFiles, local_folder
from decant.runtime.telemetry import logs
from decant.worker.settings import WorkerSettings
from decant.worker.startup import cpu_build

_T = TypeVar("_T")
_Settings = TypeVar("_Settings")
_Loaded = TypeVar("_Loaded")

_WEIGHTS = "Loading weights"
"""Transformers' progress bar over a checkpoint's tensors."""
_REPORT_INTERVAL_S = 1.0

_log = logs.get(__name__)


async def in_own_thread(load: Callable[[_Settings], _Loaded], settings: _Settings) -> _Loaded:
    """Load in a thread that ends with ``load``, as does the pool of OpenMP threads that it makes.

    The engine's thread makes another pool. With more pooled threads than cores, libgomp puts the engine's to sleep at
    every barrier.
    """
    executor = ThreadPoolExecutor(1, "load")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, load, settings)
    finally:
        executor.shutdown(wait=False)


def load_model(settings: WorkerSettings, files: ModelFiles) -> Device:
    """Load the model and measure its steps. Raises ModelRefused, InvalidConfig, DeviceFailed."""
    cpu_build.choose(settings.kernels)
    with _without_collections():
        import torch

        transformers_logging = import_transformers()
        from decant.engine.backends import choose_backend
        from decant.engine.loading import HASHED, READ, load
        from decant.engine.model import calibration
        from decant.engine.model.kv_memory import StepSizes
        from decant.engine.model.model import ModelConfig

    threads = settings.threads or available_cores()
    torch.set_num_threads(threads)  # for this thread and those that start later
    config = ModelConfig(
        model=str(local_folder(settings.model) or settings.model),
        revision=settings.model_revision,
        dtype=settings.dtype,
        device=settings.device,
        context_length=settings.context_length,
        kv_bytes=settings.kv_bytes,
        host_memory=available_memory,
        block_size=settings.block_size,
        eos_token_ids=frozenset(files.eos_token_ids),
        cuda_kernels=settings.cuda_kernels,
        exact=settings.exact,
        kv_dtype=settings.kv_dtype,
        quantize=settings.quantize,
        activations=settings.activations,
        adapters=bool(settings.adapters or settings.adapter_directory or settings.adapter_memory),
        adapter_bytes=settings.adapter_memory or 0,
        step_sizes=StepSizes(
            max(settings.token_budget or MAX_TOKEN_BUDGET, settings.max_running), settings.max_running
        ),
    )
    backend = choose_backend(config)
    cpu_build.check(settings.kernels, backend.kind)
    _log.info("loading", model=settings.model, kernels=backend.kind, threads=threads)
    with _reporting(transformers_logging.set_tqdm_hook, HASHED, READ):
        device = load(config, _report, backend)
    _log.info(
        "loaded",
        layers=len(device.store.layout.layers),
        layers_in_one_call=backend.fused_layers(device.model),
        kv_dtype=settings.kv_dtype,
        block_bytes=device.block_bytes,
    )
    if settings.threads is None:
        threads = backend.choose_threads(device, threads)
    device.costs = calibration.measure(device)
    _log_measured(device.costs, threads=threads, token_budget=limits_of(settings, device).token_budget)
    return device


def load_guides(files: ModelFiles, device: Device) -> GrammarCompiler:
    """Read the tokenizer for guided output. A model whose tokenizer can't be followed is served without."""
    guides = GrammarCompiler(files.folder / "tokenizer.json", device.vocab_size, device.eos_token_ids)
    if guides.refusal:
        _log.warning("no guided output", model=files.id, reason=guides.refusal)
    return guides


def import_transformers() -> ModuleType:
    """Import it and return its logging: its records go to the worker's log, and it shows no progress bars."""
    from transformers.utils import logging

    logging.disable_default_handler()
    logging.enable_propagation()
    logging.disable_progress_bar()
    return logging


@contextmanager
def _without_collections() -> Iterator[None]:
    """For imports: what they make is never garbage, and looking for some takes a sixth of a worker's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # else the first collection looks through all of it
        gc.enable()


def _report(percent: int) -> None:
    """Log progress for `decant up`, which shows it."""
    _log.info("loading steps", percent=percent)


@contextmanager
def _reporting(
    set_hook: Callable[[Any], Any], first: int, last: int, interval_s: float = _REPORT_INTERVAL_S
) -> Iterator[None]:
    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and kwargs.get("desc") == _WEIGHTS:
            return _with_progress(args[0], first, last, interval_s)
        return factory(*args, **kwargs)

    before = set_hook(hook)
    try:
        yield
    finally:
        set_hook(before)


def _with_progress(tensors: Collection[_T], first: int, last: int, interval_s: float) -> Iterator[_T]:
    next_at = time.monotonic() + interval_s
    for index, tensor in enumerate(tensors):
        if time.monotonic() >= next_at:
            _report(first + (last - first) * index // len(tensors))
            next_at = time.monotonic() + interval_s
        yield tensor


def limits_of(settings: WorkerSettings, device: Device) -> Limits:
    context_length = settings.context_length or longest_sequence(
        device.windows, device.num_blocks, device.block_size, device.context_length
    )
    seconds = settings.step_ms / 1000
    budget = settings.token_budget or max(settings.max_running, choose_token_budget(device.costs, seconds))
    return Limits(budget, settings.max_running, context_length, seconds)


def _log_measured(costs: StepCostModel, **chosen: int) -> None:
    _log.info(
        "step costs measured",
        **chosen,
        step_ms=round(costs.fixed * 1e3, 2),
        token_ms=round(costs.token * 1e3, 3),
        logits_ms=round(costs.logits * 1e3, 3),
        pair_us=round(costs.pair * 1e6, 4),
    )
