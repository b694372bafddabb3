from __future__ import annotations

import asyncio
from typing import Any

from decant.protos import inference_pb2 as pb
from decant.router.api.response_writer import ResponseWriter
from decant.router.api.usage import RequestMeter
from decant.router.request.output import Finish
from decant.router.request.token_stream import TokenStream
from decant.router.text.served_model import ServedModel
from decant.runtime.telemetry.metrics import Registry, RequestMetrics
from tests.router.factories import AT_LENGTH, tiny, valid, write

EOS = 1


class Reader:
    def __init__(
        self, stream: TokenStream, pace: Any = None, after_seq: int = 0, served: ServedModel | None = None
    ) -> None:
        self.stream = stream
        self.messages: list[pb.GenerateStreamResponse] = []
        self.answer = ResponseWriter(stream, served or tiny(), [after_seq] if after_seq else ())
        self.account = RequestMeter(stream, RequestMetrics(Registry(process=False)).of("tiny-python"))
        self._pace = pace

    async def __call__(self, message: pb.GenerateStreamResponse) -> None:
        self.messages.append(pb.GenerateStreamResponse.FromString(message.SerializeToString()))
        if self._pace is not None:
            await self._pace()

    async def read(self) -> list[pb.GenerateStreamResponse]:
        await self.answer.stream(self, self.account)
        return self.messages

    @property
    def deltas(self) -> list[pb.Delta]:
        return [message.delta for message in self.messages if message.HasField("delta")]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


async def read(tokens: list[int], end: Finish = AT_LENGTH, served: ServedModel | None = None, **fields: Any) -> Reader:
    reader = Reader(TokenStream(await valid(served=served, **fields)), served=served)
    write(reader.stream, *tokens, end=end)
    await reader.read()
    return reader


def options(**fields: Any) -> dict[str, Any]:
    return {"response": pb.ResponseOptions(**fields)}


async def ids_of(text: str) -> list[int]:
    return await tiny().encode(text, special=False)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
