"""Calls kernels with less memory than they need, then with ever more: they raise until there is enough.

python -m tests.engine.little_memory NAME_OF_A_BUILD
"""

from __future__ import annotations

import importlib
import resource
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from decant.engine.cpu.attention import NativeAttention
from decant.engine.cpu.gemm import PackedWeight
from decant.engine.cpu.sampler import NativeSampler
from decant.engine.kv_layout import KvFormat, KvLayout, LayerSpec
from decant.engine.model.attention.interface import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request, SamplingParams
from decant.engine.sampler_state import SamplerState

Work = Callable[[], object]


def drawing(kernels: ModuleType, size: int) -> Work:
    logits = torch.zeros(2, size, dtype=torch.bfloat16)
    one = Request("r", (0,), sampling=SamplingParams(temperature=1.0))
    rows = [Row(one, [0], 0, 1, (array("i"),), True, SamplerState(one))] * 2
    return lambda: NativeSampler(kernels).sample(rows, logits, frozenset())


def attending(kernels: ModuleType, width: int) -> Work:
    store = KvStore(KvLayout((LayerSpec(1, 16, width),), 16, KvFormat(4)), 20, torch.float32, torch.device("cpu"))
    tokens = list(range(256))
    rows = [Row(Request("r", (0,)), tokens, 0, 256, (array("i", range(16)),), True)]
    attention = NativeAttention(kernels, store, [AttentionWindow()], flatten(rows, 16, store.null_block))
    query, key = torch.zeros(1, 4, 256, 16), torch.zeros(1, 1, 256, 16)
    value = torch.zeros(1, 1, 1, width).expand(1, 1, 256, width)
    call = AttentionCall(0, query, key, value, 1.0, None, None, None)
    return lambda: attention.attend(call)


def multiplying(kernels: ModuleType, rows: int) -> Work:
    product = PackedWeight(kernels, torch.zeros(16, 1), None)
    x = torch.zeros(rows, 1)
    return lambda: product(x)


def needs_more_memory(work: Work) -> bool:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for spare in range(0, 1 << 32, 12 << 20):  # until there is enough
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
        try:
            work()
            return spare > 0
        except (MemoryError, RuntimeError):
            continue
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    raise AssertionError("4 GiB are not enough")


def main() -> None:
    torch.set_num_threads(2)
    kernels = importlib.import_module(f"decant.engine.cpu.kernels.{sys.argv[1]}")
    for make, small, large in (
        (multiplying, 1000, 98_000),
        (drawing, 1000, 30_000_000),
        (attending, 16, 40_000),
    ):
        make(kernels, small)()  # threads, and what they take once
        print(make.__name__, needs_more_memory(make(kernels, large)))


if __name__ == "__main__":
    main()
