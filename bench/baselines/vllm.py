from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from bench.comparison.metrics import summarise
from bench.comparison.open_loop import WARM_UP, run_open_loop
from bench.comparison.subprocess_runner import Job, OnProgress
from bench.workloads import Item
from decant.runtime.cores import usable_cores


class Server:
    """vLLM, which repeats all tokens of a request at every step."""

    def __init__(self, engine: Any, sampling: Any) -> None:
        self._engine = engine
        self._sampling = sampling
        self._num_reported: dict[str, int] = {}

    def add(self, item: Item) -> None:
        self._num_reported[item.id] = 0
        exactly = {"max_tokens": item.output_len, "min_tokens": item.output_len, "ignore_eos": True}
        options = self._sampling(temperature=0.0, detokenize=False, **exactly)
        self._engine.add_request(item.id, {"prompt_token_ids": item.prompt_token_ids}, options)

    def step(self) -> Iterator[str]:
        for output in self._engine.step():
            written = len(output.outputs[0].token_ids)
            for _ in range(self._num_reported[output.request_id], written):
                yield output.request_id
            self._num_reported[output.request_id] = written


def measure(job: Job, on_progress: OnProgress) -> dict[str, Any]:
    # vLLM reads these at import: one process, the configured number of threads, the engine's memory, no network.
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, job.kv_bytes >> 30)),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(_cores(job.threads)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import EngineArgs, LLMEngine, SamplingParams

    began = time.perf_counter()
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=job.model,
            dtype=job.dtype,
            skip_tokenizer_init=True,
            max_num_batched_tokens=job.token_budget,
            max_num_seqs=min(256, job.token_budget),
            enable_chunked_prefill=True,
            enable_prefix_caching=False,
        )
    )
    loaded = time.perf_counter() - began
    server = Server(engine, SamplingParams)
    run_open_loop(server, WARM_UP, lambda _: None)
    served = run_open_loop(server, job.items, on_progress)
    return {**summarise(served), "load_seconds": loaded}


def _cores(count: int) -> Iterator[str]:
    yield ",".join(map(str, usable_cores()[:count]))
