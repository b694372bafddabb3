"""Linear layers of a model whose weights are codes, as they are until a backend prepares them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from decant.engine.checkpoint.coded_embedding import CodedEmbedding
from decant.engine.checkpoint.weight import PIECE, CodeKind, Weight


class CodedLinear(nn.Module):
    """``nn.Linear`` with a quantized weight, read and dequantized for each product, some outputs at a time."""

    rounds_rows = False
    """Whether the product that a backend makes of it rounds its inputs to int8; here they stay as they are."""

    def __init__(self, source: Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.source, self.dtype = source, dtype
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.weight = torch.empty(source.shape, dtype=dtype, device="meta")  # for callers that look at its shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes, (outputs, inner) = self.source.codes().to(x.device), self.source.shape
        step = max(1, PIECE // inner)
        parts = [
            nn.functional.linear(x, codes.dequantize(x.dtype, first, first + step).to(x.dtype))
            for first in range(0, outputs, step)
        ]
        out = torch.cat(parts, -1)
        return out if self.bias is None else out + self.bias


def coded_digest(model: nn.Module) -> str:
    """Digest of which weights of a model are codes, and of which kind; empty if none is."""
    kinds = {name: each.source.kind.name for name, each in model.named_modules() if isinstance(each, CodedLinear)}
    text = "\n".join(f"{name} {kind}" for name, kind in sorted(kinds.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest() if text else ""


def round_rows(model: nn.Module) -> bool:
    """Have the layers whose codes are integers round their inputs to int8. Returns whether there are any."""
    layers = [
        each for each in model.modules() if isinstance(each, CodedLinear) and each.source.kind is not CodeKind.FP8
    ]
    for layer in layers:
        layer.rounds_rows = True
    return bool(layers)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer and no more: a router may be an ``nn.Linear`` whose forward does more."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the shape that takes no memory."""
    return torch.zeros([1] * len(shape), dtype=dtype).expand(*shape)


def _is_placeholder(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and tensor.untyped_storage().nbytes() == tensor.element_size()


def replace_placeholders(model: nn.Module, weights: Mapping[str, Weight], dtype: torch.dtype) -> None:
    """Give linear layers and embeddings ``weights``, by name, in place of their placeholders. Raises ValueError."""
    for name, weight in weights.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear | nn.Embedding) or not _is_placeholder(module.weight):
            raise ValueError(f"{weight.name} is quantized, and the model has another tensor in its place")
        parent, _, child = name.rpartition(".")
        coded = (
            CodedLinear(weight, module.bias, dtype)
            if isinstance(module, nn.Linear)
            else CodedEmbedding(weight, module.padding_idx, dtype)
        )
        setattr(model.get_submodule(parent), child, coded)


def check_replaced(model: nn.Module) -> None:
    """Raises ValueError if a placeholder is left."""
    for name, parameter in model.named_parameters():
        if _is_placeholder(parameter):
            raise ValueError(f"{name} shares a quantized weight, which is not served")
