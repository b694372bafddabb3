from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from bench.comparison.metrics import summarise
from bench.comparison.open_loop import WARM_UP, run_open_loop
from bench.comparison.subprocess_runner import Job, OnProgress
from bench.workloads import Item
from decant.bench.model_shapes import cache_folder


class Server:
    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._handles: dict[str, Any] = {}
        self._count = 0

    def add(self, item: Item) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = item.output_len
        config.do_sample = False
        config.ignore_eos, config.eos_token_id, config.stop_token_ids = True, 0, {0}
        ids = ov.Tensor(np.array([item.prompt_token_ids], np.int64))
        self._handles[item.id] = self._pipeline.add_request(self._count, ids, config)
        self._count += 1

    def step(self) -> Iterator[str]:
        self._pipeline.step()
        for id, handle in list(self._handles.items()):
            while handle.can_read():
                for output in handle.read().values():
                    yield from [id] * len(output.generated_ids)
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del self._handles[id]


def measure(job: Job, on_progress: OnProgress) -> dict[str, Any]:
    exported = export(Path(job.model))
    began = time.perf_counter()
    server = Server(make_pipeline(exported, job))
    loaded = time.perf_counter() - began
    run_open_loop(server, WARM_UP, lambda _: None)
    served = run_open_loop(server, job.items, on_progress)
    return {**summarise(served), "load_seconds": loaded}


def make_pipeline(exported: Path, job: Job) -> Any:
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_batched_tokens = job.token_budget
    scheduling.max_num_seqs = min(256, job.token_budget)
    scheduling.cache_size = max(1, job.kv_bytes >> 30)
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = False
    precision = {"bfloat16": "bf16", "float32": "f32"}[job.dtype]
    properties = {"INFERENCE_NUM_THREADS": job.threads, "INFERENCE_PRECISION_HINT": precision}
    return genai.ContinuousBatchingPipeline(exported, scheduling, "CPU", properties)


QUANTIZED: Mapping[str, Mapping[str, Any]] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4, "sym": False, "group_size": 64, "ratio": 1.0},
}
"""Of weights alone, as ``--quantize`` does it; the head is int8 with both."""


def export(model: Path, weights: str = "plain") -> Path:
    newest = max(file.stat().st_mtime_ns for file in model.glob("*.safetensors"))
    suffix = f"-{weights}" if weights in QUANTIZED else ""
    folder = cache_folder().parent / "openvino" / f"{model.name}-{newest:x}{suffix}"
    if folder.is_dir():
        return folder
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    # Write aside and rename when complete, like checkpoints.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        # An empty configuration: without one, large models would be quantized.
        quantized = OVWeightQuantizationConfig(**QUANTIZED[weights]) if weights in QUANTIZED else None
        config = OVConfig() if quantized is None else OVConfig(quantization_config=quantized)
        main_export(str(model), unfinished, task="text-generation-with-past", ov_config=config)
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
