from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import decant
import decant.client.async_client
import decant.client.client
from decant.protos import inference_pb2 as pb
from tests.decant.scripted import Script, finished, serving, started

TOKENS = {311: "return", 264: " a", 489: " +", 293: " b"}


async def adds(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    yield started(request)
    for seq, (id, text) in enumerate(TOKENS.items(), 1):
        delta = pb.Delta(text=text, num_tokens=1, token_ids=[id] if request.response.token_ids else [])
        yield pb.GenerateStreamResponse(request_id=request.request_id, seq=seq, delta=delta)
    yield finished(request, len(TOKENS))


class Deployment(Script):
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:  # noqa: N802
        answer = await super().Generate(request, context)
        answer.outputs[0].token_ids.extend(TOKENS if request.response.token_ids else [])
        return answer

    async def GetGeneration(self, request: Any, context: Any) -> Any:  # noqa: N802
        outputs = [pb.Output(text="return a")]
        stored = pb.GenerateResponse(model="tiny-python", outputs=outputs)
        state = pb.Generation.STATE_DECODING
        return pb.Generation(request_id=request.request_id, state=state, last_seq=2, result=stored)

    async def Score(self, request: Any, context: Any) -> Any:  # noqa: N802
        token = pb.TokenLogprob(token=" 4", logprob=-0.5, rank=1)
        return pb.ScoreResponse(scores=[pb.Score(logprob=-0.5, tokens=[token]), pb.Score(logprob=-3.0)])

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802
        values = [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, -0.5]]
        return pb.EmbedResponse(embeddings=[pb.Embedding(values=each) for each in values])

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.TokenizeResponse(count=2, token_ids=[41, 310])

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.DetokenizeResponse(text="def add")

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ListModelsResponse(models=[pb.Model(id="tiny-python")])

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.Model(id="tiny-python", max_context_length=2048)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerInfo(limits=pb.Limits(max_outputs=1))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    script = Deployment(answering=adds)
    script.known["6f9c"] = pb.GenerateRequest(request_id="6f9c")
    with serving(script) as address:
        yield address


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [
        test
        for module in (decant, decant.client.client, decant.client.async_client)
        for test in finder.find(module, globs={})
    ]
    return sorted((test for test in found if test.examples), key=lambda test: test.name)


async def run(test: doctest.DocTest, names: dict[str, Any]) -> None:
    for example in test.examples:
        printed = io.StringIO()
        code = compile(example.source, test.name, "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            awaiting = eval(code, names)
            if inspect.isawaitable(awaiting):
                await awaiting
        assert printed.getvalue().rstrip("\n") == example.want.rstrip("\n"), example.source


@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name)
async def test_an_example_does_what_it_says(
    test: doctest.DocTest, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = decant.AsyncClient if test.name.startswith("decant.client.async_client") else decant.Client

    def connect(_: str) -> Any:
        return kind(address)

    monkeypatch.setattr(decant, kind.__name__, connect)
    client = connect(address)
    try:
        await run(test, {kind.__name__: connect, "client": client})
    finally:
        closing = client.close()
        if inspect.isawaitable(closing):
            await closing


def test_every_public_method_has_an_example() -> None:
    names = {test.name for test in examples()}
    for kind in (decant.Client, decant.AsyncClient):
        where = f"{kind.__module__}.{kind.__name__}"
        methods = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
        assert {f"{where}.{name}" for name in methods - {"close"}} | {where} <= names
