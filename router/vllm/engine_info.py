"""What the service says of the models and of this router's load."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from decant.protos import worker_pb2 as wire
from decant.protos.vllm import vllm_engine_pb2 as vllm
from decant.router.text.served_model import ServedModel
from decant.router.workers.pool import WorkerPool
from decant.runtime.model_files import read_json

SERVER_TYPE = "vllm-grpc"
"""The protocol's name of itself."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class EngineInfoSource:
    version: str
    pool: WorkerPool
    load: Callable[[], wire.Load]
    is_ready: Callable[[], bool]
    uptime_s: Callable[[], float]

    def server_info(self, model: str) -> vllm.GetServerInfoResponse:
        load = self.load()
        return vllm.GetServerInfoResponse(
            active_requests=load.running + load.waiting,
            is_paused=load.draining,
            uptime_seconds=self.uptime_s(),
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            max_num_seqs=self.pool.capacity(model).batch_limit,
        )

    def loads(self, model: str) -> vllm.GetLoadsResponse:
        """The load of all workers as one rank; requests are those of this router, of all its models."""
        load, capacity = self.load(), self.pool.capacity(model)
        usage = self.pool.cache_usage(model)
        tokens = self.pool.cache_tokens(model)
        rank = vllm.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=round(usage * tokens),
            max_total_num_tokens=tokens,
            token_usage=usage,
            max_running_requests=capacity.batch_limit,
            num_waiting_uncached_tokens=capacity.queued_prompt_tokens,
        )
        now = datetime.now(UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=self.version, dp_rank_count=1, loads=[rank])


def model_info(model: ServedModel, context_length: int) -> vllm.GetModelInfoResponse:
    config = read_json(model.id, model.folder / "config.json") or {}
    text: dict[str, Any] = {**config, **(config.get("text_config") or {})}
    info = vllm.GetModelInfoResponse(
        model_path=model.id,
        is_generation=True,
        max_context_length=context_length,
        vocab_size=model.vocab_size,
        served_model_name=model.id,
        tokenizer_path=model.id,
        model_type=str(config.get("model_type") or ""),
        architectures=[str(name) for name in config.get("architectures") or ()],
        eos_token_ids=sorted(model.eos_token_ids),
        max_req_input_len=max(0, context_length - 1),
        default_sampling_params_json=json.dumps(_sampling_defaults(model), separators=(",", ":")),
    )
    for name in ("pad_token_id", "bos_token_id"):
        if isinstance(id := text.get(name), int):
            setattr(info, name, id)
    return info


def _sampling_defaults(model: ServedModel) -> dict[str, float]:
    values = {name: getattr(model.default_sampling, name) for name in _SAMPLING}
    # Floats of 32 bits in their shortest form: 0.7, not 0.699999988079071.
    return {name: value if isinstance(value, int) else float(f"{value:.7g}") for name, value in values.items()}
