"""Memory that no kernel has written holds NaN: a test that reads it fails.

DECANT_TEST_SHARD=1/8 runs the second of eight parts of the tests, as ``bench/gpu/first_run.sh`` does.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    index, _, count = os.environ.get("DECANT_TEST_SHARD", "0/1").partition("/")
    items[:] = items[int(index) :: int(count)]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    assert torch.ones(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(autouse=True, scope="package")
def language_patched_once() -> Iterator[None]:
    """Cache two functions of Triton's interpreter that take a fifth of these tests' time.

    At each launch and each call of a function it patches triton.language, always the same; at each operation it makes a
    table of dtypes. Raises AttributeError if a version of Triton has no such function.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_language, numpy_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    scopes, dtypes = list[Any](), dict[str, Any]()

    @functools.cache
    def patch_once(function: Any) -> Any:
        scopes.append(patch_language(function))
        return SimpleNamespace(restore=lambda: None)

    def cached_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(dtype)
        return dtypes[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_get_np_dtype", cached_dtype)
        yield
    for scope in reversed(scopes):
        scope.restore()
