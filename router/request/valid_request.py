from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.admission.request_size import RequestSize, exact_size
from decant.router.text.answer import Answer
from decant.router.text.output_text import OutputOptions
from decant.runtime.connections.channel import Deadline
from decant.state.ids import RequestKey
from decant.state.journal import TOKEN_LIMIT


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """Validated request; each attempt adds age, remaining time and earlier tokens to a copy of ``engine_request``."""

    key: RequestKey
    payload: pb.GenerateRequest
    engine_request: wire.EngineRequest
    prompt_tokens: int
    output_options: OutputOptions
    deadline: Deadline
    id_generated: bool
    accepted_at: float  # the event loop's clock
    detach_ms: int | None = None
    """How long it runs without a reader; None: the router's grace."""
    eos_token_ids: frozenset[int] = frozenset()
    session: str = ""
    """Such requests likely share a prefix; empty: none."""
    vocab_size: int = TOKEN_LIMIT
    """Output token ids are below this."""
    new_answer: Callable[[], Answer] | None = None
    """For the search of stop strings; None without any."""

    @property
    def num_outputs(self) -> int:
        return max(1, len(self.engine_request.outputs))

    @property
    def size(self) -> RequestSize:
        has_stop_strings = self.new_answer is not None
        return exact_size(self.engine_request, self.prompt_tokens, has_stop_strings=has_stop_strings)
