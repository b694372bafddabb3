from __future__ import annotations

from decant.engine.plan import Device


def load_device(folder: str, dtype: str, kv_bytes: int, threads: int) -> Device:
    """Load a model in this process. Raises ModelRefused and InvalidConfig."""
    import torch
    from transformers.utils import logging

    from decant.engine.loading import load
    from decant.engine.model.model import ModelConfig

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    return load(ModelConfig(folder, dtype=dtype, device="cpu", kv_bytes=kv_bytes))
