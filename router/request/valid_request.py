"""A request that passed validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.text.output_text import OutputOptions, OutputText
from decant.runtime.channel import Deadline
from decant.state.ids import RequestKey
from decant.state.journal import TOKEN_LIMIT


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that can be run as it stands.

    ``engine_request`` lacks its age, the rest of the deadline and the tokens of earlier attempts: an attempt adds them
    when it starts. ``payload`` is what the client sent, with its id.
    """

    key: RequestKey
    payload: pb.GenerateRequest
    engine_request: wire.EngineRequest
    prompt_tokens: int
    output_options: OutputOptions
    deadline: Deadline
    id_generated: bool
    accepted_at: float  # the event loop's clock
    detach_ms: int | None = None
    """How long it goes on when nobody reads it; None: for the router's grace."""
    eos_token_ids: frozenset[int] = frozenset()
    """Those that end its output: none where it ignores them."""
    session: str = ""
    """Whose prefix is likely this one's too, as the client hints; empty: nobody's."""
    vocab_size: int = TOKEN_LIMIT
    """Ids of its output's tokens are below this."""
    new_output_text: Callable[[], OutputText] | None = None
    """The output's text before its first token, for whoever looks for stop texts; None: there are none."""
