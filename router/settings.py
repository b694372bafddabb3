from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from decant.runtime.connections.tls import PeerTls
from decant.runtime.serving.server_settings import AdvertisedAddress, ServerSettings
from decant.runtime.settings import SettingError
from decant.runtime.telemetry.logs import LogSettings
from decant.state.store import BadUrl, check_url


class RouterSettings(LogSettings, ServerSettings, PeerTls):
    id: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="name among the processes of the deployment; unset: generated",
    )
    redis_url: str = Field(default="redis://127.0.0.1:6379", description="Redis with the state of requests")
    advertise: AdvertisedAddress | None = Field(
        default=None, description="host:port at which clients reach this router; unset: host and port"
    )
    models: tuple[str, ...] = Field(
        min_length=1, description="folders or hub names, optionally as ID=SOURCE; the first is the default model"
    )
    credentials: Path | None = Field(
        default=None, description="TOML file of the tenants that may call; unset: every client may"
    )
    queue_limit: int = Field(default=1024, ge=1, description="maximum requests that wait for a worker")
    max_queue_seconds: float = Field(
        default=60.0,
        gt=0,
        description="a request is refused at once if its predicted wait is longer",
    )
    max_active: int = Field(default=4096, ge=1, description="maximum requests in progress; more wait in the queue")
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
    serve_without_redis: bool = Field(
        default=True,
        description="accept new requests while Redis is unavailable; they cannot be resumed on another router",
    )

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, url: str) -> str:
        try:
            check_url(url)
        except BadUrl as error:
            raise SettingError("redis_url", error.limit, error.value) from None
        return url
