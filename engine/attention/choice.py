"""Which attention a step gets: compiled where it can be, else in torch's products. Their bits differ."""

from __future__ import annotations

from collections.abc import Sequence

from engine.attention import Attender
from engine.attention.native import NativeAttention
from engine.attention.paged import PagedAttention
from engine.attention.views import View
from engine.flat import FlatRows, Ints
from engine.kv_store import KvStore
from engine.native import KERNELS


def make_attention(store: KvStore, views: Sequence[View], flat: FlatRows, keep: Ints) -> Attender:
    """For one step over ``store``; ``views[i]`` is what layer i may see, ``keep`` the flattened positions whose logits
    are needed: what is compiled computes the others of the last layer no further than to their keys and values."""
    if KERNELS is not None and store.blocks.device.type == "cpu":
        return NativeAttention(KERNELS, store, views, flat, keep)
    return PagedAttention(store, views, flat)
