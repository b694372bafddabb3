from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from decant.protos.inference_pb2 import GenerateRequest, Generation
from decant.protos.state_pb2 import RequestRecord
from decant.state import journal, logprobs
from decant.state.ids import ENDED, Incarnation, RequestKey, State, is_valid_transition
from decant.state.journal import ENTRY_BYTES, Entry
from decant.state.logprobs import Logprobs


@dataclass(frozen=True)
class StoredRequest:
    """A request as the store has it: its record, and the entries of its journal from the first that was asked for."""

    key: RequestKey
    epoch: int
    attempt: int
    state: State
    owner: Incarnation
    stream_epoch: int  # the last epoch that a client's stream on another router started; 0: none
    record: RequestRecord
    payload: GenerateRequest
    entries: list[Entry]  # from the requested first one on
    length: int  # entries in the whole journal
    expires_in_s: float  # without another write
    logprobs: Logprobs = field(default_factory=Logprobs)  # one for each of `entries`, if requested
    prompt_logprobs: Logprobs = field(default_factory=Logprobs)  # of the second token and on; all or none

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def logprobs_of(self, output: int) -> Logprobs:
        """Logprobs of the entries of one output, as a copy: each output appends its own."""
        return self.logprobs.select([entry.output == output for entry in self.entries])


WRITE_BYTES = 1024


def num_generated(payload: GenerateRequest) -> int:
    """Number of outputs that workers generate for a request."""
    return max(1, payload.sampling.n, payload.sampling.best_of)


def returns_best(payload: GenerateRequest) -> bool:
    """Whether more outputs are generated than returned: those with the highest log-probabilities."""
    return payload.sampling.best_of > max(1, payload.sampling.n)


class LogprobsOptions(NamedTuple):
    """Numbers of alternatives; None for no logprobs."""

    output: int | None
    prompt: int | None

    @classmethod
    def of(cls, payload: GenerateRequest) -> LogprobsOptions:
        response = payload.response
        return cls(
            response.logprobs if response.HasField("logprobs") else 0 if returns_best(payload) else None,
            response.prompt_logprobs if response.HasField("prompt_logprobs") else None,
        )

    @property
    def any(self) -> bool:
        return self != (None, None)

    @property
    def entry_bytes(self) -> int:
        return 0 if self.output is None else logprobs.entry_bytes(self.output)


class OwnedRequest:
    """A request as its owner keeps it: enough to write it to an empty Redis.

    Only the owner changes it: the record directly, the rest through methods.
    """

    def __init__(self, key: RequestKey, owner: Incarnation, payload: GenerateRequest, record: RequestRecord) -> None:
        self.key = key
        self.owner = owner
        self.record = record
        self.epoch = 1
        self.attempt = 1
        self.state: State = Generation.STATE_QUEUED
        # equal requests have equal bytes on all routers
        self.payload = payload.SerializeToString(deterministic=True)
        self.digest = hashlib.sha256(self.payload).digest()
        self.synced_entries = 0  # entries that Redis is known to have
        self.synced_state: tuple[int, State] | None = None  # the attempt and state that Redis is known to have
        self.logprobs_options = LogprobsOptions.of(payload)
        self.result_bytes = 0  # of Redis' memory, once its end is written
        self.is_listed = True  # Redis may have it among the open requests of its owner
        self.prompt_logprobs_unsynced = False  # Redis is not known to have them
        self._journal = bytearray()
        self._num_entries = Counter[int]()  # of each output
        self._logprobs = bytearray()
        self._prompt_logprobs = b""

    @classmethod
    def begin(
        cls, key: RequestKey, owner: Incarnation, payload: GenerateRequest, record: RequestRecord, at: datetime
    ) -> OwnedRequest:
        """Make a QUEUED request in its first attempt; `at` is in UTC.

        To replace a failed request, set a greater epoch before use.
        """
        request = cls(key, owner, payload, record)
        record.create_time.FromDatetime(at)
        request._record_transition(at)
        return request

    @classmethod
    def from_stored(cls, stored: StoredRequest) -> OwnedRequest:
        """Continue a stored request. Raises ValueError unless it is whole and unfinished."""
        if stored.ended or stored.length != len(stored.entries):
            raise ValueError(f"{stored.key}: only a whole, unfinished request can be continued")
        request = cls(stored.key, stored.owner, stored.payload, stored.record)
        request.epoch, request.attempt, request.state = stored.epoch, stored.attempt, stored.state
        request.append(stored.entries, stored.logprobs.packed())
        request._prompt_logprobs = stored.prompt_logprobs.packed()
        request.synced_entries, request.synced_state = stored.length, (stored.attempt, stored.state)
        return request

    @property
    def length(self) -> int:
        return len(self._journal) // ENTRY_BYTES

    def num_entries(self, output: int) -> int:
        """Number of entries of one output."""
        return self._num_entries[output]

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def needs_write(self) -> bool:
        """Whether `Requests.flush` has something to do; changes of the record alone do not count."""
        return self.is_unsynced or (self.ended and self.is_listed)

    @property
    def is_unsynced(self) -> bool:
        return (
            self.synced_entries < self.length
            or self.synced_state != (self.attempt, self.state)
            or self.prompt_logprobs_unsynced
        )

    @property
    def has_prompt_logprobs(self) -> bool:
        return self.logprobs_options.prompt is None or self.record.prompt_tokens < 2 or bool(self._prompt_logprobs)

    def append(self, entries: Iterable[Entry], packed_logprobs: bytes = b"") -> None:
        """Append entries, with packed logprobs if requested. Raises ValueError for invalid ones and after the end."""
        if self.ended:
            raise ValueError(f"{self.key}: nothing is written after the end")
        packed = journal.pack(entries)
        if self.logprobs_options.output is not None:
            count, size = len(packed) // ENTRY_BYTES, self.logprobs_options.entry_bytes
            if len(packed_logprobs) != count * size:
                raise ValueError(
                    f"{self.key}: logprobs of {count} entries are {count * size} bytes, got {len(packed_logprobs)}"
                )
            self._logprobs += packed_logprobs
        self._journal += packed
        self._num_entries.update(journal.outputs_of(packed))

    def add_prompt_logprobs(self, packed_logprobs: bytes) -> None:
        """Set all prompt logprobs at once; ignored if they are not requested."""
        if self.logprobs_options.prompt is not None:
            self._prompt_logprobs = packed_logprobs
            self.prompt_logprobs_unsynced = bool(self._prompt_logprobs)

    @property
    def write_bytes(self) -> int:
        whole = 0 if self.synced_state else len(self.payload)
        entries = self.length - (self.synced_entries if self.synced_state else 0)
        prompt_bytes = len(self._prompt_logprobs) if self.prompt_logprobs_unsynced or not self.synced_state else 0
        return whole + entries * (ENTRY_BYTES + self.logprobs_options.entry_bytes) + prompt_bytes + WRITE_BYTES

    def packed(self, first: int) -> bytes:
        return bytes(self._journal[first * ENTRY_BYTES :])

    def packed_logprobs(self, first: int) -> bytes:
        return bytes(self._logprobs[first * self.logprobs_options.entry_bytes :])

    def packed_prompt_logprobs(self) -> bytes:
        return self._prompt_logprobs if self.prompt_logprobs_unsynced or not self.synced_state else b""

    def entries(self, first: int = 0) -> list[Entry]:
        return journal.unpack(self._journal[first * ENTRY_BYTES :])

    def transition(self, state: State, at: datetime) -> None:
        """Enter a state; `at` is in UTC. Raises ValueError for an invalid transition."""
        self._enter(state, at, new_attempt=False)

    def start_attempt(self, at: datetime) -> None:
        """Enter QUEUED in a new attempt. Raises ValueError after the end."""
        self._enter(Generation.STATE_QUEUED, at, new_attempt=True)

    def _enter(self, state: State, at: datetime, *, new_attempt: bool) -> None:
        if not is_valid_transition(state, self.state, new_attempt=new_attempt):
            raise ValueError(f"{self.key}: {State.Name(state)} doesn't follow {State.Name(self.state)}")
        self.state = state
        self.attempt += new_attempt
        self._record_transition(at)

    def _record_transition(self, at: datetime) -> None:
        transition = self.record.transitions.add(state=self.state, attempt=self.attempt)
        transition.time.FromDatetime(at)
