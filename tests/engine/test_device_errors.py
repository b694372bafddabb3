from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from decant.engine.backends import choose_device
from decant.engine.engine import Engine
from decant.engine.errors import DeviceFailed, EngineStopped, InvalidConfig, ModelRefused
from decant.engine.fake import FakeDevice
from decant.engine.library_errors import refuse_model_on_error, translate_device_errors
from decant.engine.loop import EngineLoop
from decant.engine.model.recurrent_state import refuse_other_state
from decant.engine.plan import StepPlan, StepResult
from tests.engine import tiny
from tests.engine.factories import make_request


class Failing(FakeDevice):
    def __init__(self, error: Exception, *, late: bool) -> None:
        super().__init__()
        self._error = error
        self._late = late

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        if not self._late:
            self._fail()
        return self._fail

    def _fail(self) -> StepResult:
        with translate_device_errors():
            raise self._error


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried to"),
            "DeviceFailed: the memory of the device is exhausted",
        ),
        (torch.AcceleratorError("CUDA error: unspecified launch failure", 719), "DeviceFailed: the device is lost"),
    ],
)
def test_a_failed_device_ends_the_engine_and_answers_its_callers(error: Exception, reason: str, late: bool) -> None:
    async def main() -> EngineStopped:
        crashed: asyncio.Future[EngineStopped] = asyncio.get_running_loop().create_future()
        loop = EngineLoop(Engine(Failing(error, late=late)), lambda output: None, crashed.set_result)
        loop.start()
        await loop.call(lambda engine: engine.add(make_request()))
        stopped = await asyncio.wait_for(crashed, 30)
        with pytest.raises(EngineStopped, match=reason):
            await loop.call(lambda engine: engine.load())
        return stopped

    stopped = asyncio.run(main())
    assert isinstance(stopped.__cause__, DeviceFailed)
    assert reason in str(stopped)


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), DeviceFailed),
        (torch.AcceleratorError("CUDA error: unspecified launch failure", 719), DeviceFailed),
        (RuntimeError("shapes differ"), ModelRefused),
    ],
)
def test_a_device_that_fails_during_a_load_is_not_the_fault_of_the_model(
    error: Exception, reported: type[Exception]
) -> None:
    with pytest.raises(reported), translate_device_errors(), refuse_model_on_error("m", "a step failed"):
        raise error


def test_a_kernel_that_does_not_compile_refuses_the_model() -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    with (
        pytest.raises(ModelRefused, match="a step failed: OutOfResources"),
        refuse_model_on_error("m", "a step failed"),
    ):
        raise errors.OutOfResources(300_000, 232_448, "shared memory")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        torch.AcceleratorError("CUDA error: unspecified launch failure", 719),
    ],
)
def test_a_device_that_fails_in_the_search_for_another_state_is_reported(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: object, **__: object) -> None:
        raise error

    model = AutoModelForCausalLM.from_config(tiny.config("llama"))
    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(DeviceFailed), translate_device_errors():
        refuse_other_state(model, "m", [1, 2])


def test_an_error_of_the_program_keeps_its_name() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), translate_device_errors():
        raise RuntimeError("shapes differ")


def test_a_device_that_is_not_visible_is_refused_with_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-4a1b")
    assert choose_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(
        InvalidConfig, match="a device of this machine within CUDA_VISIBLE_DEVICES=MIG-4a1b, got 'cuda:1'"
    ):
        choose_device("cuda:1")
