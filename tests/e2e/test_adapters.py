"""Adapters of real processes, which an administrator adds, replaces and removes under load."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
import pytest

from decant import models
from decant.command import adapters
from decant.command.errors import CommandFailed
from decant.engine.checkpoint.adapter import read
from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client_checks import generate_request
from tests.e2e.deployment import PATIENCE_S, Deployment
from tests.engine import peft_adapters
from tests.worker.waiting import eventually

pytestmark = pytest.mark.slow

NAME = "changing"
PROMPT = "def total(values):\n    result = 0\n"
CLIENTS, ANSWERS = 2, 3
"""Answers that come to their end between two changes, at least."""

Tokens = tuple[tuple[int, ...], ...]
REMOVED: Tokens = ()


async def answer(stub: InferenceServiceStub, name: str = NAME) -> Tokens:
    """Tokens of two outputs."""
    sampling = pb.SamplingParams(temperature=1.0, seed=5, n=2)
    request = generate_request(PROMPT, sampling=sampling, max_tokens=16)
    request.lora_name = name
    try:
        whole = await stub.Generate(request, timeout=PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        return REMOVED
    return tuple(tuple(output.token_ids) for output in whole.outputs)


async def change(running: Deployment, stub: InferenceServiceStub, folder: Path | None) -> None:
    """Have all workers offer a folder's adapter, or none, and wait until the router knows it."""
    url = running.redis.url
    if folder is None:
        await asyncio.to_thread(adapters.remove, url, None, NAME, ())
    else:
        await asyncio.to_thread(adapters.add, url, None, f"{NAME}={folder}", ())
    expected = {} if folder is None else {NAME: read(NAME, folder).digest}

    async def is_known() -> bool:
        return await offered(stub) == expected

    await eventually(is_known)


def reaches(answers: Counter[Tokens], count: int) -> bool:
    return answers.total() >= count


async def offered(stub: InferenceServiceStub) -> dict[str, str]:
    (model,) = (await stub.ListModels(pb.ListModelsRequest(), timeout=PATIENCE_S)).models
    return {adapter.name: adapter.revision for adapter in model.adapters}


async def test_answers_are_of_one_revision_while_adapters_are_added_replaced_and_removed(
    stub: InferenceServiceStub, pair: Deployment, tmp_path: Path
) -> None:
    folders = [peft_adapters.for_model(tmp_path / f"{rank}", models.path(), rank=rank, seed=rank) for rank in (4, 7)]
    revisions: list[Path | None] = [*folders, None]
    try:
        expected = []
        for folder in revisions:
            await change(pair, stub, folder)
            expected.append(await answer(stub))
        assert len({*expected, await answer(stub, "")}) == 4, "both change the answer"
        answers = Counter[Tokens]()

        async def ask_always() -> None:
            while True:
                answers[await answer(stub)] += 1

        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(ask_always()) for _ in range(CLIENTS)]
            for at in (0, 1, 2, 0):
                await change(pair, stub, revisions[at])
                assert await answer(stub) == expected[at]
                enough = answers.total() + ANSWERS
                await eventually(partial(reaches, answers, enough))
            for client in clients:
                client.cancel()
        assert answers.keys() == {*expected}, "some of each, and none of two revisions"
    finally:
        with suppress(CommandFailed):  # if it is gone already
            await asyncio.to_thread(adapters.remove, pair.redis.url, None, NAME, ())
    await asyncio.to_thread(pair.settled)
