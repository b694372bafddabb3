"""Settings of a worker's process; a role changes defaults, never names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from decant.engine.kv_layout import BLOCK_SIZE, HOST_KV_BYTES, HOST_KV_SHARE
from decant.engine.scheduler import Limits
from decant.handoff.leases import LEASE_MS
from decant.runtime.serving.server_settings import is_loopback
from decant.runtime.settings import SettingError
from decant.state.member_settings import MemberSettings

Build = Literal["auto", "avx512", "avx2", "none"]
"""Build of the CPU kernels."""

MAX_WAITING = 1024
"""Default maximum of runs that wait."""

_LIMITS = Limits()


class WorkerSettings(MemberSettings):
    model: str = Field(description="folder, GGUF file or hub name of the model")
    model_id: str | None = Field(
        default=None, min_length=1, description="id of the model for clients; unset: its own name"
    )
    model_revision: str | None = Field(default=None, description="commit of a hub model")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="dtype of weights and KV cache"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    context_length: int | None = Field(
        default=None, ge=2, description="longest sequence in tokens; unset: what the model and its KV memory allow"
    )
    kv_bytes: int | None = Field(
        default=None,
        ge=1,
        description="bytes of memory for the KV cache; unset: what a GPU has left beside weights and steps; "
        f"{HOST_KV_BYTES >> 30} GiB on a CPU, or {HOST_KV_SHARE:.0%} of the memory left if that is less",
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        le=128,
        description=f"tokens in a block, a power of two; unset: {BLOCK_SIZE}, or 64 with triton on CUDA",
    )
    step_ms: int = Field(
        default=round(_LIMITS.step_seconds * 1000),
        ge=1,
        le=60_000,
        description="milliseconds up to which prompts fill a step, or four times its time without them if longer",
    )
    token_budget: int | None = Field(
        default=None, ge=1, description="maximum tokens in a step; unset: as many as fit its time, as measured"
    )
    max_running: int = Field(default=_LIMITS.max_running, ge=1, description="maximum sequences in a batch")
    max_waiting: int = Field(
        default=MAX_WAITING, ge=1, description="maximum runs that wait for free blocks or their turn"
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of the engine; unset: the fastest number of its cores, as measured"
    )
    kernels: Build = Field(
        default="auto", description="build of the CPU kernels; none: torch alone; auto: the best one for this CPU"
    )
    cuda_kernels: Literal["auto", "none", "triton"] = Field(
        default="auto",
        description="kernels of a CUDA device; none: torch alone; triton: own kernels, of which torch replaces those "
        "that fail a trial at start; auto: triton where it is installed and supports the GPU",
    )
    kv_dtype: Literal["auto", "int8"] = Field(
        default="auto",
        description="keys and values in the KV cache; auto: in the dtype of the model; int8: in 8 bits, with a scale "
        "for each token and head",
    )
    quantize: Literal["int8", "int4"] | None = Field(
        default=None,
        description="quantize linear layers and the head while they are loaded; int8: a scale for "
        "each output; int4: one for each 64 inputs, with an int8 head; unset: as the checkpoint has them",
    )
    activations: Literal["auto", "int8"] = Field(
        default="auto",
        description="inputs of linear layers on a CPU; auto: in the dtype of the model; int8: rounded to 8 bits, with "
        "a scale for each token, where weights are int8 or int4, which is faster and less precise",
    )
    adapters: tuple[str, ...] = Field(
        default=(),
        description="LoRA adapters of the model: NAME=FOLDER, separated by commas; a folder as PEFT saves it",
    )
    adapter_directory: Path | None = Field(
        default=None,
        description="directory of further adapters, a folder each with its name; they are loaded, replaced and dropped "
        "within seconds of a change",
    )
    adapter_memory: int | None = Field(
        default=None,
        ge=1,
        description="bytes of memory for the matrices of adapters: the least recently used ones leave, and are read "
        "again by the request that needs them; set, administrators can add adapters; unset: unbounded",
    )
    exact: bool = Field(
        default=False,
        description="on CUDA with triton: EXPERIMENTAL, compute a sequence with the same bits in any "
        "batch, as on a CPU, so that a failover continues it exactly",
    )
    handoff: Literal["grpc", "nixl"] = Field(
        default="grpc",
        description="how KV caches move; grpc: in messages; nixl: EXPERIMENTAL, never run between GPUs, workers that "
        "both have it read each other's memory, without TLS",
    )
    lease_ms: int = Field(
        default=LEASE_MS, ge=1_000, description="milliseconds for which a ticket keeps its blocks unless it is renewed"
    )
    health_seconds: float = Field(
        default=60.0,
        ge=0,
        description="seconds without a step after which the worker computes a token to test itself; 0: never",
    )
    allow_unauthenticated_peers: bool = Field(
        default=False,
        description="INSECURE: listen beyond loopback without tls_client_ca; any caller can read and take over any "
        "request",
    )

    @property
    def is_open(self) -> bool:
        """Whether callers on other machines are served without authentication."""
        return self.tls_client_ca is None and not is_loopback(self.host)

    @model_validator(mode="after")
    def _authenticated_peers(self) -> WorkerSettings:
        if self.is_open and not self.allow_unauthenticated_peers:
            raise SettingError(
                "host",
                "a loopback address unless callers authenticate (set --tls-certificate, --tls-key and --tls-client-ca) "
                "or --allow-unauthenticated-peers is set",
                self.host,
            )
        if self.handoff == "nixl" and not self.allow_unauthenticated_peers:
            raise SettingError(
                "handoff",
                "grpc unless --allow-unauthenticated-peers is set: NIXL lets any process read this worker's KV cache",
                self.handoff,
            )
        if self.tls_client_ca is not None and self.peer_certificate is None:
            raise SettingError("tls_client_ca", "needs peer_ca, peer_certificate and peer_key", self.tls_client_ca)
        return self
