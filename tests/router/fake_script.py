from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from decant.protos import worker_pb2 as wire
from decant.runtime.packed import pack

LAYOUT_HASH = 7
TOKENIZER = 11
MODEL = "m"
EOS = 2


def token_at(prompt: bytes, k: int) -> int:
    return 10 + zlib.crc32(prompt + k.to_bytes(4, "little")) % 4_000  # tokens of tiny-python


def answer(prompt: list[int], count: int) -> list[int]:
    return [token_at(pack(prompt), k) for k in range(count)]


@dataclass
class Script:
    """Faults and pauses of a worker. Each use of a count reduces it by one. `go` is the worker's event."""

    refuse: list[wire.Cause] = field(default_factory=list)
    """Answers to the next runs, of either kind."""
    violation: wire.Violation | None = None
    prefill_fails_before_ticket: int = 0
    prefill_fails_after_ticket: int = 0
    prefill_breaks_after_ticket: int = 0
    handoff_fails: list[wire.Cause] = field(default_factory=list)
    """Sent instead of DecodeStarted."""
    fails_at: list[int] = field(default_factory=list)
    """Decode fails after these numbers of tokens, each once."""
    fails_at_end: int = 0
    """Number of runs that fail instead of sending Ended."""
    stops_at: int | None = None
    """The index of the output token that is EOS."""
    pause_at: int | None = None
    """Decode waits for `go` before that output token."""
    returns_no_embedding: bool = False
    """As a worker of the previous version."""
    prefill_pause: bool = False
    """Prefill waits for `go` before its ticket."""
    first_pause: bool = False
    """Prefill waits for `go` before its first token."""
    reports_late: bool = False
    """Prefill commits its KV cache; it sends its events at `go`."""
    has_no_free_blocks: bool = False
    """Runs wait for `go` before they are scheduled."""
    first_is_late: bool = False
    """A first token that ends its output comes after the receiver learned that nothing is left to decode."""
    silent: bool = False
    """Sends nothing, not even heartbeats."""
    stuck_ms: int | None = None
    drop_frames: int = 0
    """Number of frames that are not sent."""
    refuse_sessions: bool = False
    is_starting: bool = False
    """Refuses sessions as while it loads its model."""
    welcome_pause: bool = False
    """A session waits for `go` before its welcome."""
    stays: bool = False
    """A session stays open after the router's last message."""
    wrong_token_at: int | None = None
    """Sends a different token when it sends that output token a second time."""


def failed(run: wire.Run, cause: wire.Cause, peer: wire.Peer | None = None) -> wire.Failed:
    return wire.Failed(run=run, failure=wire.Failure(cause=cause, detail="scripted", peer=peer))


def logprobs_from_wire(token: int, alternatives: int) -> wire.TokenLogprobs:
    top = range(token, token + alternatives)
    return wire.TokenLogprobs(logprob=-token, rank=1, top_ids=top, top_logprobs=[-id for id in top])


def output_logprobs(work: wire.EngineRequest, entry: int, token: int) -> wire.TokenLogprobs | None:
    if not work.HasField("logprobs"):
        return None
    found = logprobs_from_wire(token, work.logprobs)
    found.entry = entry
    return found


def prompt_logprobs(
    run: wire.Run, work: wire.EngineRequest
) -> tuple[list[wire.PromptLogprobs], list[wire.PromptLogprobs]]:
    """Logprobs of the prompt in two parts, if requested; position n has the logprob -n."""
    if not work.HasField("prompt_logprobs"):
        return [], []
    positions = range(1, len(work.prompt) // 4)
    middle = len(positions) // 2

    def message(part: range) -> wire.PromptLogprobs:
        logprobs = [wire.TokenLogprobs(logprob=-position) for position in part]
        return wire.PromptLogprobs(run=run, first_position=part.start, logprobs=logprobs)

    return [message(positions[:middle])], [message(positions[middle:])]
