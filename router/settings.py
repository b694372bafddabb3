from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, field_validator

from decant.engine.request import MAX_PRIORITY
from decant.runtime.byte_size import BYTE_SIZE, parse_byte_size
from decant.runtime.settings import SettingError
from decant.state.member_settings import MemberSettings

_WHOLE_NUMBER = re.compile(r"-?\d{1,9}")

MIN_KV_EVENT_BYTES = 16 << 20
"""With less, subscribers that are slow for a moment would fall behind what is kept."""


class RouterSettings(MemberSettings):
    models: tuple[str, ...] = Field(
        min_length=1,
        description="folders, GGUF files or hub names, optionally as ID=SOURCE; the first is the default model",
    )
    add_bos: tuple[str, ...] = Field(
        default=(),
        description="ids of models whose text prompts begin with the BOS token although tokenizer.json adds none; "
        "the same on all routers",
    )
    credentials: Path | None = Field(
        default=None, description="TOML file of the tenants that may call; unset: every client may"
    )
    queue_limit: int = Field(default=1024, ge=1, description="maximum requests that wait for a worker")
    max_queue_seconds: float = Field(
        default=60.0,
        gt=0,
        description="a request is refused at once if its forecast wait is longer",
    )
    worker_wait_seconds: float = Field(
        default=0.0,
        ge=0,
        description="seconds that a request waits for a first worker while none serves its model, such as for pools "
        "that scale from zero; 0: it is refused at once",
    )
    max_active: int = Field(default=4096, ge=1, description="maximum requests of a model in progress; more wait")
    flush_ms: int = Field(default=200, ge=1, le=10_000, description="milliseconds between two writes of the journals")
    resume_grace_ms: int = Field(
        default=3_000, ge=0, description="milliseconds to resume a lost stream before its request is cancelled"
    )
    attempts: int = Field(default=3, ge=1, le=100, description="attempts at one request, the first included")
    handoff_min_tokens: int | None = Field(
        default=None,
        ge=0,
        description="prompts with fewer uncached tokens are computed on the decode worker; 0: none; unset: measured",
    )
    connection_seconds: float = Field(
        default=60.0,
        ge=1,
        le=86_400,
        description="seconds after which a client connects again, and so resolves the name of the routers again;"
        " running calls end on their connection",
    )
    stream_keepalive_seconds: float = Field(
        default=2.0,
        ge=0,
        le=3_600,
        description="seconds without a message after which a stream sends `waiting`, so that proxies with an idle "
        "limit above that do not cut it; 0: never, else at least 0.01",
    )
    result_memory: str | None = Field(
        default=None,
        description="bytes of Redis' memory for results of all routers, such as 512M; the oldest are deleted first; "
        "unset: half of Redis' maxmemory, 256M without one",
    )
    objectives: tuple[str, ...] = Field(
        default=(),
        description="priorities of llm-d's objectives as NAME=PRIORITY, such as critical=100; for calls of VllmEngine "
        "with the metadata x-llm-d-inference-objective",
    )
    kv_event_memory: str | None = Field(
        default=None,
        description="bytes for the tokens of cached blocks, such as 256M, at least 16M, to serve SubscribeKvEvents; "
        "unset: off, because a gateway before several routers of one deployment would send each prefix to one router",
    )
    balance_pools: bool = Field(
        default=False,
        description="move workers between the pools of prefill and decode as the load demands, without a restart, and "
        "running sequences from crowded decode workers to idle ones; one router at a time does",
    )
    serve_without_redis: bool = Field(
        default=True,
        description="accept new requests while Redis is unavailable; they cannot be resumed on another router",
    )

    @property
    def max_connection_age_s(self) -> float | None:
        return self.connection_seconds

    @field_validator("result_memory")
    @classmethod
    def _result_memory(cls, size: str | None) -> str | None:
        try:
            return size if size is None or parse_byte_size(size) else None
        except ValueError:
            raise SettingError("result_memory", BYTE_SIZE, size) from None

    @field_validator("kv_event_memory")
    @classmethod
    def _kv_event_memory(cls, size: str | None) -> str | None:
        try:
            if size is None or parse_byte_size(size) >= MIN_KV_EVENT_BYTES:
                return size
        except ValueError:
            pass
        raise SettingError("kv_event_memory", "a size from 16M, such as 256M or 2G", size)

    @field_validator("stream_keepalive_seconds")
    @classmethod
    def _stream_keepalive_seconds(cls, seconds: float) -> float:
        if 0 < seconds < 0.01:
            raise SettingError(
                "stream_keepalive_seconds", "0, or at least 0.01", seconds
            )  # its timer would fill a core
        return seconds

    @field_validator("objectives")
    @classmethod
    def _objectives(cls, objectives: tuple[str, ...]) -> tuple[str, ...]:
        for objective in objectives:
            name, _, priority = objective.partition("=")
            if not name or not _WHOLE_NUMBER.fullmatch(priority) or abs(int(priority)) > MAX_PRIORITY:
                limit = f"NAME=PRIORITY with a priority from -{MAX_PRIORITY} to {MAX_PRIORITY}"
                raise SettingError("objectives", limit, objective)
        return objectives

    @property
    def priorities(self) -> Mapping[str, int]:
        """Priorities of objectives by name."""
        return {name: int(priority) for name, _, priority in (each.partition("=") for each in self.objectives)}

    @property
    def kv_event_bytes(self) -> int | None:
        return parse_byte_size(self.kv_event_memory) if self.kv_event_memory is not None else None

    @property
    def result_bytes(self) -> int | None:
        return parse_byte_size(self.result_memory) if self.result_memory is not None else None
