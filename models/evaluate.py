from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

# Number of windows that start per window length.
OVERLAP = 2


@dataclass(frozen=True)
class Continuation:
    """Greedily decoded tokens; ``margin`` is the smallest lead of a chosen token over the next, in logits."""

    prompt: list[int]
    tokens: list[int]
    margin: float


@torch.inference_mode()
def document_nats(model: LlamaForCausalLM, document: np.ndarray) -> float:
    """Sum of nats of all tokens after the first. Windows overlap by half; a token counts in the first that has it."""
    ids = torch.from_numpy(document.astype(np.int64)).to(model.device)
    size = model.config.max_position_embeddings
    total, scored = 0.0, 1
    for start in range(0, len(ids), size // OVERLAP):
        piece = ids[start : start + size]
        logits = model(piece[None], use_cache=False).logits[0].float()
        losses = functional.cross_entropy(logits[:-1], piece[1:], reduction="none")
        total += losses[scored - start - 1 :].double().sum().item()
        scored = start + len(piece)
        if scored == len(ids):
            break
    return total


def mean_nats(model: LlamaForCausalLM, documents: list[np.ndarray]) -> float:
    total = sum(document_nats(model, document) for document in documents)
    return total / sum(len(document) - 1 for document in documents)


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompt: list[int], length: int) -> Continuation:
    ids = torch.tensor([prompt], device=model.device)
    margin = float("inf")
    for _ in range(length):
        logits = model(ids, use_cache=False).logits[0, -1].float()
        best = logits.topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        ids = torch.cat([ids, best.indices[None, :1]], dim=1)
        if best.indices[0] == model.config.eos_token_id:
            break
    return Continuation(prompt, ids[0, len(prompt) :].tolist(), margin)


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM, prompt: list[int], seed: int, temperature: float = 0.7, length: int = 200
) -> list[int]:
    torch.manual_seed(seed)
    ids = torch.tensor([prompt], device=model.device)
    drawn = model.generate(  # type: ignore[misc]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=length,
    )
    tokens: list[int] = drawn[0, len(prompt) :].tolist()
    return tokens
