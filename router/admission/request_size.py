from __future__ import annotations

from dataclasses import dataclass

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.state.owned import num_generated


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What a request costs: tokens of its prompt and of each output."""

    prompt_tokens: int
    """May be a lower bound before the prompt is tokenized."""
    max_tokens: int
    min_tokens: int = 0
    """Output tokens below which the answer can't end."""
    is_limit_set: bool = True
    """Whether the client, not the context length, sets ``max_tokens``."""
    num_outputs: int = 1

    @property
    def max_total_tokens(self) -> int:
        return self.prompt_tokens + self.num_outputs * self.max_tokens


def least_size(request: pb.GenerateRequest, prompt_tokens: int, context_length: int) -> RequestSize:
    """Size of a request that is not validated yet, with a lower bound of its ``prompt_tokens``."""
    stopping = request.stopping
    left = max(1, context_length - prompt_tokens)
    is_limit_set = stopping.HasField("max_tokens") and stopping.max_tokens <= left
    max_tokens = stopping.max_tokens if is_limit_set else left
    is_forced = stopping.ignore_eos and not stopping.stop and not stopping.stop_token_ids
    min_tokens, outputs = max_tokens if is_forced else stopping.min_tokens, num_generated(request)
    return RequestSize(prompt_tokens, max_tokens, min_tokens, is_limit_set, outputs)


def exact_size(request: wire.EngineRequest, prompt_tokens: int, *, has_stop_strings: bool) -> RequestSize:
    stopping = request.stopping
    is_forced = stopping.ignore_eos and not has_stop_strings and not stopping.stop_token_ids
    min_tokens = stopping.max_tokens if is_forced else stopping.min_tokens
    is_limit_set, outputs = not stopping.capped_by_context_length, max(1, len(request.outputs))
    return RequestSize(prompt_tokens, stopping.max_tokens, min_tokens, is_limit_set, outputs)
