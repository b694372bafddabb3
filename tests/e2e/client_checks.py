from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from decant import models
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.output import Token
from decant.engine.request import Request, SamplingParams, StopParams
from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc
from tests.e2e.deployment import PATIENCE_S

TOKENIZER = Tokenizer.from_file(str(models.path() / "tokenizer.json"))
END = 1
"""The small model's end-of-text token."""


@dataclass
class Answer:
    started: pb.Started
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    deltas: int = 0
    finished: pb.Finished = field(default_factory=pb.Finished)
    usage: pb.Usage = field(default_factory=pb.Usage)
    receipt: pb.Receipt = field(default_factory=pb.Receipt)


def generate_request(
    prompt: str | Sequence[int], *, sampling: pb.SamplingParams | None = None, max_tokens: int | None = None
) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    request.sampling.CopyFrom(sampling or pb.SamplingParams(temperature=0))
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    request.response.token_ids = True
    return request


async def ask(stub: inference_pb2_grpc.InferenceServiceStub, request: pb.GenerateRequest) -> Answer:
    call = stub.GenerateStream(request, timeout=PATIENCE_S)
    return join_messages([message async for message in call])


def join_messages(messages: Iterable[pb.GenerateStreamResponse]) -> Answer:
    """Check the protocol and collect the answer.

    The messages are: started delta* (delta* finished)+, usage and receipt in the last, seq never decreasing. On a busy
    machine ``waiting`` is between them.
    """
    first, *middle, last = (message for message in messages if not message.HasField("waiting"))
    assert first.WhichOneof("event") == "started"
    answer = Answer(first.started)
    seq = first.seq
    for message in middle:
        assert message.WhichOneof("event") == "delta", message
        assert not message.HasField("usage")
        assert message.seq == seq + message.delta.num_tokens
        seq = message.seq
        answer.deltas += 1
        answer.text += message.delta.text
        answer.ids.extend(message.delta.token_ids)
        answer.logprobs.extend(message.delta.logprobs)
    assert last.WhichOneof("event") == "finished"
    assert last.seq == seq == last.usage.completion_tokens
    assert len({first.request_id, *(message.request_id for message in middle), last.request_id}) == 1
    answer.finished, answer.usage, answer.receipt = last.finished, last.usage, last.receipt
    return answer


@functools.cache
def plain_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(models.path(), dtype=torch.float32).eval()


def check_generated(prompt: Sequence[int], ids: Sequence[int], max_tokens: int) -> None:
    """Check that these are the tokens of transformers' greedy ``generate``: each the likeliest, up to the first end.

    One pass over all of them, a tenth of the time that ``generate`` takes.
    """
    whole = torch.tensor([[*prompt, *ids]])
    with torch.inference_mode():
        logits = plain_model()(whole, use_cache=False, logits_to_keep=len(ids) + 1).logits[0, :-1]
    assert list(ids) == logits.argmax(-1).tolist()
    assert END not in ids[:-1]
    assert len(ids) == max_tokens or (len(ids) < max_tokens and ids[-1] == END)


@functools.cache
def device(dtype: str) -> ModelDevice:
    return load(ModelConfig(str(models.path()), dtype=dtype, kv_bytes=64 << 20, eos_token_ids=frozenset({END})))


def run_alone(
    dtype: str, ids: Sequence[int], sampling: SamplingParams, max_tokens: int, logprobs: int | None = None
) -> list[Token]:
    """Return the engine's output without batch, chunks or handoff."""
    engine = Engine(device(dtype))
    stop = StopParams(max_tokens=max_tokens)
    engine.add(Request("alone", tuple(ids), sampling=sampling, stop=stop, logprobs=logprobs, use_prefix_cache=False))
    tokens: list[Token] = []
    while engine.has_work:
        tokens += engine.step().tokens
    return tokens


def check_greedy(prompt: Sequence[int], text: str, ids: Sequence[int]) -> None:
    """Check that the engine finds every token the likeliest after those before it, and that they are this text.

    One pass over all of them: a token's logits have the same bits in any chunking.
    """
    engine = Engine(device("float32"))
    whole = (*prompt, *ids)
    engine.add(Request("check", whole, stop=StopParams(max_tokens=1), prompt_logprobs=0, use_prefix_cache=False))
    ranks: list[int] = []
    while engine.has_work:
        ranks += [entry.rank for part in engine.step().prompt_logprobs for entry in part.entries]
    assert ranks[len(prompt) - 1 :] == [1] * len(ids)
    assert text == TOKENIZER.decode(ids)


def open_stub(address: str) -> tuple[grpc.aio.Channel, inference_pb2_grpc.InferenceServiceStub]:
    channel = grpc.aio.insecure_channel(address)
    return channel, inference_pb2_grpc.InferenceServiceStub(channel)
