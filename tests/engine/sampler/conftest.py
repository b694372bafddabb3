from __future__ import annotations

from pathlib import Path

import pytest

from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.cpu.sampler import SCORES_AT_ONCE
from decant.engine.model.model import ModelDevice
from decant.engine.model.sampler import Sampler
from tests.engine import tiny
from tests.engine.sampler.harness import SAMPLER, serve


@pytest.fixture(params=["compiled", "torch"])
def each_sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setitem(SAMPLER, "sampler", Sampler(SCORES_AT_ONCE))
    elif KERNELS is None:
        pytest.skip("this CPU has no AVX2, or no compiler was here")


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.config("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def device(folder: Path) -> ModelDevice:
    return serve(folder)
