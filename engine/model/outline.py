"""What a worker would hold of a model, from its configuration alone: no weight is read, and little memory is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.utils import logging

from decant.engine.checkpoint.checkpoint import Checkpoint, open_config
from decant.engine.errors import ModelRefused
from decant.engine.kv_layout import LayerSpec
from decant.engine.library_errors import refuse_model_on_error
from decant.engine.model import rope
from decant.engine.model.attention.interface import AttentionCall, attending
from decant.engine.model.meta_weights import META, MetaWeights, UnknownLists
from decant.engine.model.parallel_experts import skip_products
from decant.engine.model.probe import learn_attention
from decant.engine.model.recurrent_state import refuse_other_state

_TOKENS = [1, 2, 3]
_REPEATED = [0, 1, 2, 0, 1]
_UNNAMED_CONTEXT = 4096

REFUSED_BY_NUMBERS = frozenset({"longcat_flash"})
"""Model types whose sequences depend on their neighbours, as a worker finds at load with the weights' numbers."""


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Sizes in elements.

    params        of the model without towers of other media; a tied head is not counted again
    embeddings    those in tables from which a token takes a row
    tied          those of them that are the head too
    active        those that a token is multiplied with, each as often as it is; None: experts are chosen in a way that
                  needs numbers
    heads         attention heads of a layer
    layers        KV of each layer
    quantization  of the weights in the files, but those in tables: int8, int4, fp8 or None
    context_length  in tokens; None: the configuration names none
    """

    params: int
    embeddings: int
    tied: int
    active: int | None
    heads: int
    layers: tuple[LayerSpec, ...]
    context_length: int | None
    quantization: str | None = None


def read_outline(file: Path, name: str) -> ModelOutline:
    """Outline a config.json of the hub name, folder or file ``name``. Raises ModelRefused."""
    shown = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers warns of what is then refused
    try:
        return outline(open_config(file, name))
    finally:
        logging.set_verbosity(shown)


class _NoAttention:
    def attend(self, call: AttentionCall) -> torch.Tensor:
        _, heads, tokens, _ = call.query.shape
        return call.query.new_empty(1, tokens, heads, call.value.shape[3])


@torch.inference_mode()
def outline(checkpoint: Checkpoint) -> ModelOutline:
    """Make the model on the meta device, and refuse it as a load does, where that needs no numbers.

    Raises ModelRefused.
    """
    name, text = checkpoint.name, checkpoint.config.get_text_config()
    if checkpoint.config.model_type in REFUSED_BY_NUMBERS:
        raise ModelRefused(name, "a sequence's logits depend on its neighbours")
    is_named = getattr(text, "max_position_embeddings", None) is not None
    context_length = checkpoint.choose_context_length(None if is_named else _UNNAMED_CONTEXT)
    model = checkpoint.make(META).requires_grad_(False)  # the counter would hook gradients
    skip_products(model)
    with MetaWeights() as mode, UnknownLists(mode):
        with refuse_model_on_error(name, "its rotary scaling can't be frozen"):
            rope.freeze(model, context_length)
        refuse_other_state(model, name, _TOKENS)
        counter = FlopCounterMode(display=False)
        with counter:
            _, layers = learn_attention(model, name, context_length)
        _check_lookups(model, name, mode)
    tables = {id(table.weight): table.weight for table in model.modules() if isinstance(table, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    tied = 0 if head is None or id(head.weight) not in tables else head.weight.numel()
    # A multiplication and an addition for each parameter and each of the two tokens of that pass.
    return ModelOutline(
        params=sum(parameter.numel() for parameter in model.parameters()),
        embeddings=sum(table.numel() for table in tables.values()),
        tied=tied,
        active=None if mode.skips_code else counter.get_total_flops() // 4,
        heads=text.num_attention_heads,
        layers=layers,
        context_length=context_length if is_named else None,
        quantization=checkpoint.weight_format.quantization,
    )


def _check_lookups(model: PreTrainedModel, name: str, mode: MetaWeights) -> None:
    """Refuse a model that counts rows instead of positions: the sequences of a step share its rows."""
    expected = _lookups(model, name, mode, _TOKENS, {})
    tokens = [_TOKENS[index] for index in _REPEATED]
    found = _lookups(model, name, mode, tokens, {"position_ids": torch.tensor([_REPEATED])})
    for one, other in zip(expected, found, strict=False):
        if not (one.is_meta or other.is_meta or torch.equal(one[..., _REPEATED].flatten(), other.flatten())):
            raise ModelRefused(name, "beside others, a sequence looks embeddings up at other indices than alone")


def _lookups(
    model: PreTrainedModel, name: str, mode: MetaWeights, tokens: Sequence[int], options: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    mode.lookups = []
    with refuse_model_on_error(name, "a pass failed"), attending(_NoAttention()):
        model(input_ids=torch.tensor([tokens]), use_cache=False, **options)
    return mode.lookups
