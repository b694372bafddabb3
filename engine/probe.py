"""Is a model served right? Learnt and tried at load; no list of names decides.

Two short random sequences in one flattened row must give, bit for bit, what each gives alone, and, within the
rounding of the dtype, what transformers' own attention gave each before anything was replaced. Attention must be
called exactly once per layer. Whatever differs is named in the refusal.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from engine.attention import NAME, attending, calls_made
from engine.attention.views import Recorder, View, mask_markers
from engine.errors import ModelRefused
from engine.kv_layout import KvLayout, LayerSpec
from engine.kv_store import KvStore
from engine.plan import Row
from engine.request import Request
from engine.runner import ModelRunner

LENGTHS = (13, 22)
"""Tokens of the two sequences: different, odd and even, more than a block of 16 in one."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Root mean square difference of logits, over their spread, that rounding explains."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the probe saw of a model that is served.

    exact       together equals alone to the bit (the second law); promised on a CPU
    difference  from transformers' own attention, as a share of the logits' spread
    """

    exact: bool
    difference: float


def _sequences(model: PreTrainedModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = table(model).num_embeddings
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.inference_mode()
def alone(model: PreTrainedModel) -> list[torch.Tensor]:
    """Logits [length, vocabulary] of each probe sequence by transformers' own attention."""
    return [model(input_ids=_ids(model, tokens), use_cache=False).logits[0].float() for tokens in _sequences(model)]


@torch.inference_mode()
def learn(model: PreTrainedModel, name: str, window: int) -> tuple[tuple[View, ...], tuple[LayerSpec, ...]]:
    """Plug our attention in; what each layer may see, and the shape of its keys and values. Raises ModelRefused."""
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise ModelRefused(name, f"its attention can't be replaced: {error}") from error
    layers = model.config.get_text_config().num_hidden_layers
    with mask_markers() as markers:
        recorder = Recorder(name, markers, window)
        with attending(recorder):
            model(input_ids=_ids(model, _sequences(model)[0][:2]), use_cache=False)
            calls = calls_made()
    if calls != layers:
        raise ModelRefused(name, f"attention was called {calls} times for {layers} layers")
    return tuple(recorder.views), tuple(recorder.specs)


@torch.inference_mode()
def probe(
    model: PreTrainedModel,
    name: str,
    layout: KvLayout,
    views: Sequence[View],
    reference: Sequence[torch.Tensor],
) -> Verdict:
    """Compare together, alone, and the reference. Raises ModelRefused."""
    dtype, device = table(model).weight.dtype, reference[0].device
    rows = _rows(_sequences(model), layout.block_size)
    needed = sum(len(row.blocks) for row in rows)
    runner = ModelRunner(model, KvStore(layout, needed, dtype, device), views, frozenset())
    together = runner.logits(rows, torch.arange(sum(LENGTHS))).float().split(LENGTHS)
    separate = [runner.logits([row], torch.arange(row.end)).float() for row in rows]
    worst = max(_difference(ours, theirs) for ours, theirs in zip(together, reference, strict=True))
    if not worst < TOLERANCE[dtype]:
        raise ModelRefused(name, f"its logits differ from transformers' own by {worst:.2g} of their spread")
    exact = all(torch.equal(one, other) for one, other in zip(together, separate, strict=True))
    mixed = max(_difference(one, other) for one, other in zip(together, separate, strict=True))
    if not mixed < TOLERANCE[dtype] or (device.type == "cpu" and not exact):
        raise ModelRefused(name, f"a sequence's logits depend on its neighbours, by {mixed:.2g} of their spread")
    return Verdict(exact, worst)


def table(model: PreTrainedModel) -> torch.nn.Embedding:
    """The model's token embeddings: they tell its vocabulary and dtype."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Embedding)
    return embeddings


def _rows(sequences: Sequence[Sequence[int]], block_size: int) -> list[Row]:
    """The sequences as rows of one step, longest context first, on blocks of their own."""
    rows, first = [], 0
    for index, tokens in enumerate(sequences):
        count = -(-len(tokens) // block_size)
        request = Request(f"probe-{index}", tuple(tokens))
        rows.append(Row(request, tokens, 0, len(tokens), array("i", range(first, first + count)), True))
        first += count
    return rows


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).square().mean().sqrt() / theirs.std().clamp(min=1e-9))


def _ids(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([tokens], device=model.device)
