from __future__ import annotations

from dataclasses import dataclass

from decant.runtime.grpc_options import PORT


@dataclass(frozen=True)
class UpOptions:
    """Options of `decant up`, described in `decant.command.options`."""

    model: str | None = None
    router: int = 1
    prefill: int = 1
    decode: int = 1
    port: int = PORT
    gateway: int | None = None
    openai: int | None = None
    host: str = "127.0.0.1"
    redis_url: str | None = None
    dtype: str = "auto"
    kv_memory: str | None = None
    adapters: tuple[str, ...] = ()
    adapter_memory: str | None = None
    ready_seconds: float = 600.0
    log_format: str = "auto"
