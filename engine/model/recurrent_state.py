from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
from transformers.generation.utils import ALL_CACHE_NAMES

from decant.engine.errors import ModelRefused
from decant.engine.library_errors import DEVICE_ERRORS, FAILURES

KV = "past_key_values"
KV_NAMES = ("keys", "values")


@torch.inference_mode()
def refuse_other_state(model: PreTrainedModel, name: str, tokens: list[int]) -> None:
    """Refuse a model with a state other than keys and values (Mamba, linear attention): only blocks are transferred.

    A model whose pass fails is left to the probe.
    """
    with suppress(*FAILURES):
        for index, layer in enumerate(DynamicCache(config=model.config).layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                raise ModelRefused(name, f"it keeps a state other than KV ({type(layer).__name__} in layer {index})")
    before = {id(value) for _, value in _attributes(model)}
    try:
        out = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=True)
    except DEVICE_ERRORS:
        raise
    except FAILURES:
        return
    caches = {name: getattr(out, name, None) for name in ALL_CACHE_NAMES}
    found = [path for cache, value in caches.items() for path in _tensors(value, cache)]
    found += [path for path, value in _attributes(model) if id(value) not in before]
    if found:
        raise ModelRefused(name, f"it keeps a state other than KV ({found[0]})")


def _attributes(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                yield f"{path}.{name}", value


def _tensors(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        if value.numel() > 1 and not (path.startswith(KV) and path.rpartition(".")[2] in KV_NAMES):
            yield path
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part, path)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, path)
    elif type(value).__module__.startswith("transformers."):
        for name, part in vars(value).items():
            yield from _tensors(part, f"{path}.{name}")
