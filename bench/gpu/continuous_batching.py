"""transformers' continuous batching of requests in the shape of a model, in a process of its own.

    python -m bench.gpu.continuous_batching < JOB        prints {"tokens": ..., "seconds": ...} as its last line

What it holds on the GPU ends with its process. The time counts from the first request: captures come before it, as
those of Decant come with a load.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.gpu import shapes


@dataclass(frozen=True)
class Job:
    model: str
    device: str
    context_length: int
    prompts: list[list[int]]
    output: int


def measure(job: Job, seconds: float) -> tuple[int, float]:
    """Tokens generated, and seconds. Raises RuntimeError with the process's last line of errors."""
    command = [sys.executable, "-m", __name__]
    text = json.dumps(asdict(job))
    try:
        done = subprocess.run(command, check=False, input=text, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"transformers took more than {seconds:.0f} s") from error
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    result = json.loads(done.stdout.splitlines()[-1])
    return result["tokens"], result["seconds"]


def generate(job: Job) -> dict[str, Any]:
    device = torch.device(job.device)
    model: Any = shapes.make_model(job.model, job.context_length, device)
    if not hasattr(model, "generate_batch"):
        raise RuntimeError("this transformers has no generate_batch")
    model.set_attn_implementation("paged|sdpa")
    model.generation_config.update(max_new_tokens=job.output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(job.prompts, generation_config=model.generation_config)
    ends = [one.lifespan[1] for one in outputs.values()]
    seconds = max(ends) - min(one.created_time for one in outputs.values()) if ends else 0.0
    tokens = sum(len(one.generated_tokens) for one in outputs.values())
    if tokens < len(job.prompts) * job.output:
        raise RuntimeError(f"it generated {tokens} of {len(job.prompts) * job.output} tokens")
    return {"tokens": tokens, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(generate(Job(**json.load(sys.stdin)))), flush=True)
