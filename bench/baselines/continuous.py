"""transformers' continuous batching, below ``generate_batch``, with streamed requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

from bench.comparison.metrics import summarise
from bench.comparison.open_loop import WARM_UP, run_open_loop
from bench.comparison.subprocess_runner import Job, OnProgress
from bench.workloads import Item

SILENCE_S = 600.0


class Server:
    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._num_reported: dict[str, int] = {}

    def add(self, item: Item) -> None:
        self._num_reported[item.id] = 0
        options = {"max_new_tokens": item.output_len, "streaming": True, "eos_token_id": -1}
        self._manager.add_request(item.prompt_token_ids, item.id, **options)

    def step(self) -> Iterator[str]:
        result = self._manager.get_result(timeout=SILENCE_S)
        if result is None or result.error:
            raise RuntimeError(f"the server stopped: {result and result.error}")
        written = len(result.generated_tokens)
        for _ in range(self._num_reported[result.request_id], written):
            yield result.request_id
        self._num_reported[result.request_id] = written


def measure(job: Job, on_progress: OnProgress) -> dict[str, Any]:
    torch.set_num_threads(job.threads)
    began = time.perf_counter()
    dtype = getattr(torch, job.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, use_safetensors=True)
    model.generation_config.do_sample = False
    config = model.config
    slot = 2 * config.num_key_value_heads * _head_dim(config) * config.num_hidden_layers * dtype.itemsize
    page = ContinuousBatchingConfig().page_size
    batching = ContinuousBatchingConfig(
        num_blocks=max(1, job.kv_bytes // (slot * page)), max_batch_tokens=job.token_budget
    )
    with model.continuous_batching_context_manager(continuous_batching_config=batching) as manager:
        loaded = time.perf_counter() - began
        server = Server(manager)
        run_open_loop(server, WARM_UP, lambda _: None)
        served = run_open_loop(server, job.items, on_progress)
    return {**summarise(served), "load_seconds": loaded}


def _head_dim(config: Any) -> int:
    own: int | None = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads
