from __future__ import annotations

import gc
import logging
import threading

import pytest
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM
from transformers.utils.logging import enable_default_handler, set_tqdm_hook

from decant.decode_worker.main import DecodeSettings
from decant.engine.costs import StepCostModel
from decant.engine.fake import FakeDevice
from decant.engine.kv_layout import FULL, Window, WindowKind
from decant.engine.loading import HASHED, READ, load
from decant.engine.model.model import ModelConfig
from decant.engine.scheduler import TOKEN_BUDGET, choose_token_budget
from decant.models import path
from decant.worker.settings import WorkerSettings
from decant.worker.startup import load_model as loading
from decant.worker.startup.load_model import in_own_thread, limits_of

SLOW = StepCostModel(fixed=0.05, token=0.004, pair=1e-6)


def device(costs: StepCostModel) -> FakeDevice:
    made = FakeDevice(num_blocks=64, block_size=16)
    made.costs = costs
    return made


def test_records_of_transformers_go_to_the_handlers_of_the_process() -> None:
    library = logging.getLogger("transformers")
    enable_default_handler()
    library.propagate = False
    loading.import_transformers()
    assert logging.StreamHandler not in map(type, library.handlers)
    assert library.propagate


def test_the_context_length_is_what_the_blocks_of_all_cache_groups_hold() -> None:
    small = device(StepCostModel())
    small.context_length = 4096
    assert limits_of(settings(), small).context_length == 64 * 16
    small.windows = (FULL, Window(WindowKind.SLIDING, 32))
    assert limits_of(settings(), small).context_length == 60 * 16, "at most four blocks are of the window"
    small.windows = (Window(WindowKind.SLIDING, 32),)
    assert limits_of(settings(), small).context_length == 4096


def settings(**given: int) -> DecodeSettings:
    return DecodeSettings(model="any", max_running=4, **given)  # type: ignore[arg-type]


def test_the_token_budget_is_chosen_from_measurements_unless_it_is_set() -> None:
    assert limits_of(settings(), device(SLOW)).token_budget == choose_token_budget(SLOW, 0.25) == 64
    assert limits_of(settings(step_ms=1000), device(SLOW)).token_budget == 128
    assert limits_of(settings(token_budget=77), device(SLOW)).token_budget == 77
    assert limits_of(settings(), device(StepCostModel())).token_budget == TOKEN_BUDGET


def test_a_step_has_a_token_for_each_sequence_of_a_batch_however_slow_the_machine() -> None:
    many = DecodeSettings(model="any", max_running=300)
    assert limits_of(many, device(SLOW)).token_budget == 300


def test_the_time_of_a_step_is_that_of_the_settings() -> None:
    assert limits_of(settings(), device(SLOW)).step_seconds == 0.25
    assert limits_of(settings(step_ms=80), device(SLOW)).step_seconds == 0.08


async def test_a_device_is_loaded_in_a_thread_that_ends_and_its_error_is_raised() -> None:
    threads: list[threading.Thread] = []

    def load(settings: WorkerSettings) -> FakeDevice:
        threads.append(threading.current_thread())
        if settings.max_running == 1:
            raise ValueError("no such model")
        return device(SLOW)

    assert (await in_own_thread(load, settings())).costs == SLOW
    with pytest.raises(ValueError, match="no such model"):
        await in_own_thread(load, DecodeSettings(model="any", max_running=1))
    for thread in threads:
        assert thread is not threading.current_thread()
        thread.join(60)
        assert not thread.is_alive()


def test_garbage_is_collected_again_after_imports_that_fail() -> None:
    def import_nothing() -> None:
        with loading._without_collections():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        import_nothing()
    assert gc.isenabled()


def test_the_reading_of_tensors_is_reported() -> None:
    with capture_logs() as logged, loading._reporting(set_tqdm_hook, 10, 30, interval_s=0):
        AutoModelForCausalLM.from_pretrained(path())
    percents = [line["percent"] for line in logged if line["event"] == "loading steps"]
    assert percents[0] == 10
    assert percents == sorted(percents)
    assert 28 <= percents[-1] < 30
    assert set_tqdm_hook(None) is None


def test_each_step_of_a_load_is_reported() -> None:
    percents: list[int] = []
    load(ModelConfig(model=str(path()), kv_bytes=1 << 20), percents.append)
    assert percents[0] == 0
    assert {HASHED, READ} < set(percents)
    assert percents == sorted(set(percents))
    assert percents[-1] < 100
