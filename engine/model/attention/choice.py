"""Which attention a step gets: compiled where it can be, else in torch's products. Their bits differ."""

from __future__ import annotations

from collections.abc import Sequence

from decant.engine.cpu.attention import NativeAttention
from decant.engine.cpu.kernels import KERNELS
from decant.engine.model.attention import AttentionBackend
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.attention.paged import PagedAttention
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, Ints


def make_attention(store: KvStore, views: Sequence[AttentionWindow], flat: FlatBatch, keep: Ints) -> AttentionBackend:
    """For one step over ``store``; ``views[i]`` is what layer i may see, ``keep`` the flattened positions whose logits
    are needed: what is compiled computes the others of the last layer no further than to their keys and values."""
    if KERNELS is not None and store.blocks.device.type == "cpu":
        return NativeAttention(KERNELS, store, views, flat, keep)
    return PagedAttention(store, views, flat)
