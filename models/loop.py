from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from decant.models import bpe, corpus
from decant.models.muon import Muon
from decant.models.recipe import Recipe

CHECKPOINT_EVERY = 25
# Called after each step with the step's number, its loss in nats per token and its seconds.
Report = Callable[[int, float, float], None]


class CheckpointMismatch(Exception):
    """The checkpoint belongs to another recipe, corpus, device, number of threads or version of torch."""


@dataclasses.dataclass
class Run:
    model: LlamaForCausalLM
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.mlp_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.long_context,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=bpe.BEGIN_ID,
        eos_token_id=bpe.END_ID,
    )
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices = [param for name, param in model.named_parameters() if param.ndim == 2 and "layers" in name]
    others = [param for name, param in model.named_parameters() if param.ndim != 2 or "layers" not in name]
    return [
        Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def batches(recipe: Recipe, documents: list[np.ndarray], start: int) -> Iterator[np.ndarray]:
    """Batches from step ``start`` on; each depends only on its step, so a resumed run gets the same ones."""
    switch = recipe.steps - recipe.long_steps
    for first, last, length in ((0, switch, recipe.context), (switch, recipe.steps, recipe.long_context)):
        rows = recipe.tokens_per_step // length
        cut = corpus.batches(documents, length, rows, recipe.seed)
        yield from islice(cut, max(0, min(start, last) - first), last - first)


def fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def train_step(run: Run, recipe: Recipe, batch: torch.Tensor) -> float:
    """Train on ``int64[rows, length + 1]``; return the mean loss in nats per token.

    Small pieces of rows limit the logits' memory and keep them in the CPU cache.
    """
    factor = recipe.learning_rate_factor(run.step)
    for optimizer, rate in zip(run.optimizers, (recipe.muon_lr, recipe.adam_lr), strict=True):
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
    autocast = torch.autocast(batch.device.type, torch.bfloat16, enabled=fast_bfloat16(batch.device))
    total = 0.0
    for piece in batch.split(max(1, recipe.micro_batch_tokens // (batch.size(1) - 1))):
        with autocast:
            hidden = run.model.model(piece[:, :-1], use_cache=False).last_hidden_state
            logits = run.model.lm_head(hidden)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten(), reduction="sum")
        loss = loss / (batch.size(0) * (batch.size(1) - 1))
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), recipe.clip_norm)
    for optimizer in run.optimizers:
        optimizer.step()
    run.step += 1
    return total


def train(recipe: Recipe, documents: list[np.ndarray], checkpoint: Path, device: torch.device, report: Report) -> Run:
    """Train, or resume from ``checkpoint``; an interruption does not change the result."""
    model = build_model(recipe).to(device)  # type: ignore[arg-type]
    run = Run(model, build_optimizers(model, recipe))
    identity = _identity(recipe, documents, device)
    if checkpoint.exists():
        restore(run, checkpoint, identity)
    for array in batches(recipe, documents, run.step):
        started = time.perf_counter()
        loss = train_step(run, recipe, torch.from_numpy(array).to(device))
        elapsed = time.perf_counter() - started
        run.seconds += elapsed
        report(run.step, loss, elapsed)
        if run.step % CHECKPOINT_EVERY == 0 or run.step == recipe.steps:
            save(run, checkpoint, identity)
    return run


def save(run: Run, checkpoint: Path, identity: dict[str, Any]) -> None:
    state = {
        "identity": identity,
        "step": run.step,
        "seconds": run.seconds,
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
    }
    partial = checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, checkpoint)


def restore(run: Run, checkpoint: Path, identity: dict[str, Any]) -> None:
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    for key, value in identity.items():
        saved = state["identity"].get(key)
        if saved != value:
            raise CheckpointMismatch(f"{checkpoint}: {key} is {saved}, this run has {value}")
    run.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    run.step, run.seconds = state["step"], state["seconds"]


def _identity(recipe: Recipe, documents: list[np.ndarray], device: torch.device) -> dict[str, Any]:
    """Facts that must agree for a resumed run to equal an uninterrupted one."""
    return {
        "recipe": dataclasses.asdict(recipe),
        "tokens": sum(len(document) for document in documents),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }
