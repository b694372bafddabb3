"""The model on its device, measured: the one place that brings torch into a worker."""

from __future__ import annotations

import os
from pathlib import Path

from engine.costs import Costs
from engine.plan import Device
from engine.scheduler import Limits, choose_token_budget
from runtime import logs
from worker.settings import WorkerSettings

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

_log = logs.get(__name__)


def load_model(settings: WorkerSettings) -> Device:
    """Loads the model, then measures what its steps take. Raises ModelRefused, InvalidConfig."""
    import torch
    from transformers.utils import logging

    from engine import native, warm_start
    from engine.layer import joined
    from engine.model import ModelConfig, load

    logging.disable_progress_bar()
    threads = settings.threads or own_cores()
    torch.set_num_threads(threads)  # for this thread, and for all that begin later
    _log.info("loading", model=settings.model, kernels=native.kind(), threads=threads)
    device = load(
        ModelConfig(
            model=settings.model,
            revision=settings.model_revision,
            dtype=settings.dtype,
            device=settings.device,
            window=settings.window,
            kv_bytes=settings.kv_bytes,
            block_size=settings.block_size,
        )
    )
    _log.info("loaded", layers=len(device.store.layout.layers), layers_in_one_call=len(joined(device.model)))
    if settings.threads is None and device.store.blocks.device.type == "cpu":
        threads = warm_start.choose_threads(device, threads, torch.set_num_threads)
    device.costs = warm_start.measure(device)
    _tell(device.costs, threads=threads, token_budget=limits_of(settings, device).token_budget)
    return device


def limits_of(settings: WorkerSettings, device: Device) -> Limits:
    """What was asked for, else: the model's window or what the KV memory holds, whichever is less; as many tokens as
    fit in a step's time, and at least one for each sequence in a batch."""
    window = settings.window or min(device.window, device.num_blocks * device.block_size)
    seconds = settings.step_ms / 1000
    budget = settings.token_budget or max(settings.max_running, choose_token_budget(device.costs, seconds))
    return Limits(budget, settings.max_running, window, seconds)


def own_cores(quota: Path = _CPU_QUOTA) -> int:
    """Cores that this process may run on, no more than its control group has time for."""
    cores = len(os.sched_getaffinity(0))
    try:
        share, period = (int(word) for word in quota.read_text().split())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return cores
    return max(1, min(cores, share // period))


def _tell(costs: Costs, **chosen: int) -> None:
    _log.info(
        "measured",
        **chosen,
        step_ms=round(costs.fixed * 1e3, 2),
        token_ms=round(costs.token * 1e3, 3),
        logits_ms=round(costs.logits * 1e3, 3),
        pair_us=round(costs.pair * 1e6, 4),
    )
