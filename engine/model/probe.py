"""Is a model served right? Learnt and tried at load; no list of names decides.

Three short random sequences, one of them at the end of the window, in one flattened row, must give what transformers'
own attention gives each of them alone. Attention must be called exactly once per layer. Whatever differs is named in
the refusal. This is compared twice:

- In float32, on the model's own modules: equal up to rounding. This decides whether masks, positions and scales are
  right. In bfloat16 it can't be decided: where a router of experts is near a tie, rounding may choose another expert,
  and logits then differ as much as those of a wrong model.
- As it will be served, its weights laid out: on a CPU bit for bit the same alone as among others; and typically not
  much further from float32 than rounding takes transformers' own.

The one at the end of the window stands there alone: all tokens before it were seen, and are hidden from it. It
finds what counts rows instead of positions, such as a scale of the scores that grows every few thousand tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from decant.engine.checkpoint.checkpoint import refusing
from decant.engine.errors import ModelRefused
from decant.engine.kv_layout import KvLayout, LayerSpec
from decant.engine.model.attention import NAME, attending, calls_made
from decant.engine.model.attention.masks import AttentionWindow, Recorder, mask_markers
from decant.engine.model.float32 import Float32
from decant.engine.model.kv_store import KvStore
from decant.engine.model.runner import ModelRunner
from decant.engine.plan import Row
from decant.engine.request import Request

LENGTHS = (22, 13, 9)
"""Most tokens of the sequences: different, odd and even, more than a block of 16 in one. The last one stands at the
end of the window."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Root mean square difference of logits, over their spread, that rounding explains."""

MORE_NOISE = 2.0
"""How many times as far as transformers' own a served model may be from float32, where that is beyond TOLERANCE."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the probe saw of a model that is served.

    exact       together equals alone to the bit (the second law); promised on a CPU
    difference  from transformers' own attention, both in float32, as a share of the logits' spread
    """

    exact: bool
    difference: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A probe sequence: ``tokens`` at positions from ``start`` on, which see nothing before ``start``."""

    tokens: list[int]
    start: int


def trials(model: PreTrainedModel, context_length: int) -> list[Trial]:
    """What a model is tried with."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, context_length) for length in LENGTHS]
    starts = [0] * (len(LENGTHS) - 1) + [context_length - lengths[-1]]
    vocabulary = table(model).num_embeddings
    return [
        Trial(torch.randint(vocabulary, (length,), generator=generator).tolist(), start)
        for length, start in zip(lengths, starts, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Reference:
    """Logits [length, vocabulary] of each trial by transformers' own attention, computed in float32.

    ``noise`` is how far the model's own dtype typically takes transformers from them. The last trial needs a cache that
    forgets; a model with a state of another kind can't use one, and is refused first for what the other trials find.
    """

    logits: list[torch.Tensor]
    noise: float
    failed: ModelRefused | None = None


@torch.inference_mode()
def alone(model: PreTrainedModel, name: str, context_length: int) -> Reference:
    """What the trials must give; before anything is replaced. Raises ModelRefused."""
    with refusing(name, "transformers' own attention failed"):
        *early, last = trials(model, context_length)
        exact, noise = _exact(model, early)
    try:
        with refusing(name, f"transformers' own attention at position {last.start} failed"):
            logits, last_noise = _exact(model, [last])
            return Reference([*exact, *logits], max(noise, last_noise))
    except ModelRefused as refused:
        return Reference(exact, noise, refused)


def _exact(model: PreTrainedModel, tried: Sequence[Trial]) -> tuple[list[torch.Tensor], float]:
    """Logits of trials of one start in float32, and how far at most the model's own dtype is from them."""
    with Float32():
        exact = _alone(model, tried)
    if table(model).weight.dtype == torch.float32:
        return exact, 0.0
    return exact, max(map(_typical_difference, _alone(model, tried), exact))


def _alone(model: PreTrainedModel, tried: Sequence[Trial]) -> list[torch.Tensor]:
    """Logits of trials of one start, in one batch, since weights are widened in every pass. Shorter ones are padded on
    the right, where a causal model's tokens do not look."""
    start, length = tried[0].start, max(len(trial.tokens) for trial in tried)
    ids = torch.tensor([trial.tokens + [0] * (length - len(trial.tokens)) for trial in tried], device=model.device)
    options: dict[str, Any] = {"use_cache": False}
    if start:
        count = model.config.get_text_config().num_hidden_layers
        layers: list[Any] = [_Forgotten(start) for _ in range(count)]
        positions = torch.arange(start, start + length, device=model.device)
        options = {"use_cache": True, "past_key_values": Cache(layers=layers), "position_ids": positions[None]}
    logits = model(input_ids=ids, **options).logits.float()
    return [row[: len(trial.tokens)] for row, trial in zip(logits, tried, strict=True)]


class _Forgotten(DynamicLayer):
    """A layer's cache that has seen ``seen`` tokens and kept none of them."""

    def __init__(self, seen: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.seen

    def get_seq_length(self) -> int:
        return self.seen


@dataclass(frozen=True, slots=True)
class _From(AttentionWindow):
    """A layer's view without what lies before ``start`` in a sequence that begins there."""

    start: int = 0

    def first(self, positions: torch.Tensor) -> torch.Tensor:
        earliest = AttentionWindow.first(self, positions)
        return torch.where(positions < self.start, earliest, earliest.clamp(min=self.start))


@torch.inference_mode()
def learn(
    model: PreTrainedModel, name: str, context_length: int
) -> tuple[tuple[AttentionWindow, ...], tuple[LayerSpec, ...]]:
    """Plug our attention in; what each layer may see, and the shape of its keys and values. Raises ModelRefused."""
    with refusing(name, "replacing its attention failed"):
        model.set_attn_implementation(NAME)
        layers = model.config.get_text_config().num_hidden_layers
    with mask_markers() as markers:
        recorder = Recorder(name, markers, context_length)
        with attending(recorder), refusing(name, "a pass with its attention replaced failed"):
            model(input_ids=_ids(model, trials(model, context_length)[0].tokens[:2]), use_cache=False)
            calls = calls_made()
    if calls != layers or not layers:
        reason = f"transformers' attention functions were called {calls} times for {layers} layers"
        raise ModelRefused(name, f"its attention can't be replaced: {reason}")
    _check_kept(model, name, recorder.views, context_length)
    return tuple(recorder.views), tuple(recorder.specs)


def _check_kept(model: PreTrainedModel, name: str, views: Sequence[AttentionWindow], context_length: int) -> None:
    """Refuse a model that sees more of a prompt than transformers' own cache keeps of it for the answer."""
    with refusing(name, "making transformers' own cache failed"):
        layers = DynamicCache(config=model.config).layers
    for index, (view, layer) in enumerate(zip(views, layers, strict=False)):
        kept = getattr(layer, "sliding_window", None) or context_length
        seen = context_length - int(view.first(torch.tensor(context_length - 1)))
        if seen > kept:
            raise ModelRefused(name, f"layer {index} sees {seen} tokens of a prompt, and {kept} from its cache")


@torch.inference_mode()
def check_attention(
    model: PreTrainedModel,
    name: str,
    layout: KvLayout,
    views: Sequence[AttentionWindow],
    reference: Reference,
    context_length: int,
) -> float:
    """Compare the model's own modules with our attention to the reference, in float32; before weights are laid out.

    Returns the largest difference, as a share of the logits' spread. Raises ModelRefused.
    """
    wide = KvLayout(layout.layers, layout.block_size, torch.float32.itemsize)
    rows = _rows(trials(model, context_length), layout.block_size)
    with refusing(name, "a step of several sequences failed"), Float32():
        together = _together(_runner(model, wide, views, rows, torch.float32), rows)
    worst = 0.0
    for ours, theirs in zip(together, reference.logits, strict=False):
        worst = max(worst, difference := _difference(ours, theirs))
        if not difference < TOLERANCE[torch.float32]:
            where = " at the end of the window" if ours is together[-1] else ""
            reason = f"its logits{where} differ from transformers' own by {difference:.2g} of their spread"
            raise ModelRefused(name, reason)
    if reference.failed is not None:
        raise reference.failed
    return worst


@torch.inference_mode()
def probe(
    model: PreTrainedModel,
    name: str,
    layout: KvLayout,
    views: Sequence[AttentionWindow],
    reference: Reference,
    context_length: int,
) -> bool:
    """Compare together with alone, and with the reference, as the model will be served. Raises ModelRefused.

    Returns whether together equals alone to the bit. Of a difference from the reference the median over positions
    counts: a router near a tie moves a few positions far, a weight that is laid out wrong moves all of them.
    """
    dtype, device = table(model).weight.dtype, model.device
    rows = _rows(trials(model, context_length), layout.block_size)
    with refusing(name, "a step of several sequences failed"):
        runner = _runner(model, layout, views, rows, dtype)
        together, apart = _together(runner, rows), _apart(runner, rows)
    pairs = [(one[-len(other) :], other) for others in apart for one, other in zip(together, others, strict=True)]
    exact = all(torch.equal(one, other) for one, other in pairs)
    mixed = max(_typical_difference(one, other) for one, other in pairs)
    if not mixed < TOLERANCE[dtype] or (device.type == "cpu" and not exact):
        raise ModelRefused(name, f"a sequence's logits depend on its neighbours, by {mixed:.2g} of their spread")
    rounded = max(map(_typical_difference, together, reference.logits))
    if not rounded < max(TOLERANCE[dtype], MORE_NOISE * reference.noise):
        reason = (
            f"its logits in {str(dtype).removeprefix('torch.')} differ from float32 by {rounded:.2g} of their spread"
        )
        raise ModelRefused(name, reason)
    return exact


def _runner(
    model: PreTrainedModel, layout: KvLayout, views: Sequence[AttentionWindow], rows: Sequence[Row], dtype: torch.dtype
) -> ModelRunner:
    """A runner over blocks of its own, in which the last row sees nothing before its start."""
    count = 1 + max(block for row in rows for block in row.blocks)
    store = KvStore(layout, count, dtype, model.device)
    late = [_From(view.kind, view.size, rows[-1].start) for view in views]
    return ModelRunner(model, store, late, frozenset())


def _together(runner: ModelRunner, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Logits of each row, all of them in one step."""
    inverted = [rows[-1], *rows[:-1]]  # the longest context first
    lengths = [row.end - row.start for row in inverted]
    last, *others = runner.logits(inverted, np.arange(sum(lengths))).float().split(lengths)
    return [*others, last]


def _apart(runner: ModelRunner, rows: Sequence[Row]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of each row in a step of its own, and those of its last position in a step that needs no others."""
    separate = [runner.logits([row], np.arange(row.end - row.start)).float() for row in rows]
    inverted = [rows[-1], *rows[:-1]]
    lengths = [row.end - row.start for row in inverted]
    final, *finals = runner.logits(inverted, np.cumsum(lengths) - 1).float().split(1)
    return separate, [*finals, final]


def table(model: PreTrainedModel) -> torch.nn.Embedding:
    """The model's token embeddings: they tell its vocabulary and dtype."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Embedding)
    return embeddings


def _rows(tried: Sequence[Trial], block_size: int) -> list[Row]:
    """The trials as rows of a step, on blocks of their own from 1 on.

    What lies before a start is in block 0, and seen by nobody.
    """
    rows, free = [], 1
    for index, trial in enumerate(tried):
        end = trial.start + len(trial.tokens)
        hidden = trial.start // block_size
        count = -(-end // block_size) - hidden
        blocks = array("i", [0] * hidden + list(range(free, free + count)))
        tokens = [0] * trial.start + trial.tokens
        rows.append(Row(Request(f"probe-{index}", tuple(trial.tokens)), tokens, trial.start, end, blocks, True))
        free += count
    return rows


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).square().mean().sqrt() / theirs.std().clamp(min=1e-9))


def _typical_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """``_difference``, of the median position."""
    return float((ours - theirs).square().mean(-1).sqrt().median() / theirs.std().clamp(min=1e-9))


def _ids(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([tokens], device=model.device)
