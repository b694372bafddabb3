"""Workers of each quantized format: split, drain and a lost worker give the text that one worker gives alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from decant.engine.checkpoint import checkpoint as checkpoints
from decant.engine.kv_layout import KvFormat, KvLayout, LayerSpec
from decant.engine.plan import StepPlan, StepResult
from decant.protos import worker_pb2 as wire
from tests.engine import quantized, tiny
from tests.engine.quantized_models import MODELS, Started
from tests.engine.served import serve
from tests.worker.decode_harness import Node, make_run, make_work
from tests.worker.session_client import Router
from tests.worker.test_migration import take_ticket

RUN = make_run()
PROMPT, WANTED, LOGPROBS = 30, 24, 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread would wait busily for work that is too small for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Paced:
    """A device whose steps begin ``seconds`` late."""

    def __init__(self, started: Started) -> None:
        self._device: Any = serve(started.model, dtype="bfloat16", block_size=4, **started.options)
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        time.sleep(self.seconds)
        submit: Callable[[StepPlan], Callable[[], StepResult]] = self._device.submit
        return submit(plan)


def make(salt: str, **more: Any) -> wire.EngineRequest:
    """The same request, whose blocks are found by requests of the same salt alone."""
    work = make_work(PROMPT, WANTED, seed=5, logprobs=LOGPROBS, **more)
    work.salt = salt.encode()
    return work


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
async def test_split_drain_and_a_lost_worker_give_the_text_of_one_worker(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    started = MODELS[name](tmp_path)
    one, other = Paced(started), Paced(started)
    assert one.layout_hash == other.layout_hash
    assert one.equal_bits
    async with (
        Node("p", blocks=24, device=one) as prefill,
        Node("d", blocks=24, device=other) as decode,
        Router(prefill) as target,
        Router(decode) as source,
    ):
        await target.start(make_run("t/alone"), make("alone"))
        [alone] = await target.until_ended(make_run("t/alone"))
        assert len(alone.text(PROMPT)) == len(alone.logprobs) == WANTED

        def after(position: int) -> Mapping[int, wire.TokenLogprobs]:
            return {at: each for at, each in alone.logprobs.items() if at >= position}

        other.seconds = 0.15  # the run lasts for seconds, until it is drained
        await source.start(RUN, make("split"), await prefill.offer(RUN, make("split")))
        await source.until_tokens(RUN, 5)
        ticket = await take_ticket(source)
        assert "decode_started" in source.record_of(RUN).kinds
        await target.start(RUN, make("split"), ticket)
        [drained] = await target.until_ended(RUN)
        assert "decode_started" in drained.kinds
        assert drained.tokens == alone.tokens
        # Those of the first token go to the router from the prefill worker.
        assert drained.logprobs == after(PROMPT + 1)
        await source.forget(RUN)

        other.seconds = 0.0
        written, again = alone.text(PROMPT)[:7], make_run(attempt=2)
        await source.start(again, make("lost", written=written))
        [moved] = await source.until_ended(again)
        assert written + moved.text(PROMPT) == alone.text(PROMPT)
        assert moved.logprobs == after(PROMPT + len(written))


def test_workers_of_one_model_in_different_formats_exchange_no_caches(tmp_path: Path) -> None:
    """A ticket of another layout hash is refused: tests/worker/test_decode_start.py."""
    plain = tiny.save(tiny.config("llama", num_hidden_layers=1), tmp_path / "plain")
    hashes, layout = set[str](), KvLayout((LayerSpec(2, 16, 16),), 4, KvFormat(2))
    for name, each in quantized.LAYOUTS.items():
        folder = shutil.copytree(plain, tmp_path / name)
        quantized.quantize(folder, each)
        weights = checkpoints.open(str(folder)).weights()
        hashes.add(checkpoints.layout_hash(weights, layout, 64, "torch.bfloat16", ("cpu", "one")))
    assert len(hashes) == len(quantized.LAYOUTS)
