"""A worker that has been idle computes a token of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from decant.engine.plan import StepResult
from decant.worker.health_trial import TRIAL, HealthTrial
from tests.worker.harness import WorkerHarness, worker
from tests.worker.waiting import PATIENCE, eventually

SOON_S = 0.01
"""Idle time after which a test's worker tries itself."""


@asynccontextmanager
async def tried(harness: WorkerHarness, limit_s: float = PATIENCE) -> AsyncIterator[list[str]]:
    failures: list[str] = []
    trial = HealthTrial(harness.host, failures.append, SOON_S, limit_s)
    running = asyncio.ensure_future(trial.run())
    try:
        yield failures
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_an_idle_worker_computes_the_same_token_again_and_again_and_leaves_nothing() -> None:
    async with worker() as harness:
        async with tried(harness) as failures:
            await eventually(lambda: len(harness.outputs.get(TRIAL, [])) >= 3)
            assert not (await harness.audit()).violations
        assert len(set(harness.outputs[TRIAL])) == 1
        assert not failures
        await harness.emptied()


async def test_an_engine_that_takes_no_step_is_noticed() -> None:
    async with worker() as harness:
        harness.device.hold()
        async with tried(harness, limit_s=0.1) as failures:
            await eventually(lambda: failures)
        assert failures == ["the engine computed no token in 0.1 s"]
        harness.device.go_on()
        await harness.emptied()


def other_tokens(result: StepResult) -> StepResult:
    return replace(result, sampled=[None if token is None else token + 1 for token in result.sampled])


def no_logits(result: StepResult) -> StepResult:
    rows = len(result.sampled)
    return replace(result, sampled=[None] * rows, failed=dict.fromkeys(range(rows), "logits are not finite"))


@pytest.mark.parametrize(
    ("fault", "reason"), [(other_tokens, "where it computed"), (no_logits, "the engine failed: logits are not finite")]
)
async def test_a_device_that_computes_wrong_is_noticed(
    fault: Callable[[StepResult], StepResult], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker() as harness, tried(harness) as failures:
        harness.host.equal_bits = True  # as a CPU's
        await eventually(lambda: TRIAL in harness.outputs)
        run = harness.device.run
        monkeypatch.setattr(harness.device, "run", lambda plan: fault(run(plan)))
        await eventually(lambda: failures)
        assert reason in failures[0]
        await harness.emptied()
