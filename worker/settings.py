"""Settings of a worker's process; a role changes defaults, never names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from decant.runtime.logs import LogSettings
from decant.runtime.server_settings import ServerSettings, is_loopback
from decant.runtime.settings import SettingError
from decant.runtime.tls import PeerTls
from decant.state.store import BadUrl, check_url
from decant.worker.startup.cpu_build import Build


class WorkerSettings(LogSettings, ServerSettings, PeerTls):
    """How a worker runs."""

    id: str | None = Field(
        default=None, min_length=1, max_length=128, description="name among its peers; unset: made up"
    )
    redis_url: str = Field(default="redis://127.0.0.1:6379", description="where the directory is")
    advertise: str | None = Field(
        default=None, description="host:port under which others reach this worker; unset: host and port"
    )
    model: str = Field(description="folder or hub name of the model")
    model_id: str | None = Field(default=None, min_length=1, description="what clients call it; unset: its own name")
    model_revision: str | None = Field(default=None, description="commit of a hub model")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(default="auto", description="of weights and cache")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    window: int | None = Field(default=None, ge=2, description="longest sequence in tokens; unset: model's or memory's")
    kv_bytes: int = Field(default=1 << 30, ge=1, description="memory for the KV cache")
    block_size: int = Field(default=16, ge=1, le=128, description="tokens in a block, a power of two")
    step_ms: int = Field(
        default=250,
        ge=1,
        le=60_000,
        description="a step with answers in it is filled with prompts up to so long, or four times the answers alone",
    )
    token_budget: int | None = Field(
        default=None, ge=1, description="most tokens in a step; unset: what a step has the time for, as measured"
    )
    max_running: int = Field(default=256, ge=1, description="sequences in a batch")
    max_waiting: int = Field(default=1024, ge=1, description="runs that may wait for room or their turn")
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of the engine; unset: as many of its cores as are fastest"
    )
    kernels: Build = Field(
        default="auto", description="CPU build to run: avx512, avx2, or none of the compiled kernels; auto: the best"
    )
    lease_ms: int = Field(default=10_000, ge=1_000, description="how long a ticket keeps its blocks unless renewed")
    allow_unauthenticated_peers: bool = Field(
        default=False,
        description="INSECURE: listen beyond loopback without tls_client_ca; any caller can read and take any request",
    )

    @property
    def is_open(self) -> bool:
        """Whether callers on other machines are served without authentication."""
        return self.tls_client_ca is None and not is_loopback(self.host)

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, url: str) -> str:
        try:
            check_url(url)
        except BadUrl as error:
            raise SettingError("redis_url", error.limit, error.value) from None
        return url

    @model_validator(mode="after")
    def _authenticated_peers(self) -> WorkerSettings:
        if self.is_open and not self.allow_unauthenticated_peers:
            raise SettingError(
                "host",
                "a loopback address unless callers authenticate (set --tls-certificate, --tls-key and --tls-client-ca) "
                "or --allow-unauthenticated-peers is set",
                self.host,
            )
        if self.tls_client_ca is not None and self.peer_certificate is None:
            raise SettingError("tls_client_ca", "needs peer_ca, peer_certificate and peer_key", self.tls_client_ca)
        return self
