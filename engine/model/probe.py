"""Probe: tests at load whether a model is computed correctly.

Three short random sequences in one batch must have the logits of transformers' own attention. One is at the end of the
context length and sees nothing before its start: it detects models that count rows instead of positions. The comparison
is made twice, as an error in bfloat16 looks like rounding:

- In float32: equal up to rounding.
- As served: about as far from float32 as transformers' own; on an exact backend the same bits alone and in a batch. A
  router near a tie chooses other experts after another rounding, which changes the rest of that sequence. So a wrongly
  packed weight shows in the median over the positions of all sequences, and a sequence alone has to be far off.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from decant.engine.errors import ModelRefused
from decant.engine.kv_layout import KvFormat, KvLayout, LayerSpec
from decant.engine.library_errors import refuse_model_on_error
from decant.engine.model.attention.interface import NAME, attending, calls_made
from decant.engine.model.attention.masks import AttentionWindow, Recorder, mask_markers
from decant.engine.model.backend import PARTS, Backend
from decant.engine.model.float32 import Float32
from decant.engine.model.runner import ModelRunner
from decant.engine.plan import Row
from decant.engine.request import Request

LENGTHS = (22, 13, 9)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.02, torch.float16: 0.004}
"""Root mean square difference that rounding explains, relative to the logits' spread."""

CODED_TOLERANCE = 0.1
"""The same with keys and values in 8 bits, in any dtype."""

ROUNDED_TOLERANCE = 0.25
"""The same with activations in 8 bits, in any dtype."""

OTHER_EXPERTS = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.5}
"""The same of one sequence, some of whose tokens may have other experts."""

NEIGHBOURS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""The same between a sequence alone and in a batch, on a backend that is not exact."""

NOISE_FACTOR = 2.0
"""Beyond TOLERANCE and OTHER_EXPERTS, how many times as far from float32 as transformers' own a served model may be."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    exact: bool
    difference: float


@dataclass(frozen=True, slots=True)
class ProbeSequence:
    """Tokens from position ``start`` on, which see nothing before it."""

    tokens: list[int]
    start: int


def probe_sequences(model: PreTrainedModel, context_length: int) -> list[ProbeSequence]:
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, context_length) for length in LENGTHS]
    starts = [0] * (len(LENGTHS) - 1) + [context_length - lengths[-1]]
    vocabulary = token_embeddings(model).num_embeddings
    return [
        ProbeSequence(torch.randint(vocabulary, (length,), generator=generator).tolist(), start)
        for length, start in zip(lengths, starts, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Reference:
    """Float32 logits [length, vocabulary] of each probe sequence by transformers' own attention.

    ``noise``: how far the model's own dtype is from them, at each position; zeros for float32. ``failed``: why the last
    sequence has none.
    """

    logits: list[torch.Tensor]
    noise: list[torch.Tensor]
    failed: ModelRefused | None = None


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, name: str, context_length: int) -> Reference:
    with refuse_model_on_error(name, "transformers' own attention failed"):
        *early, last = probe_sequences(model, context_length)
        exact, noise = _float32_logits(model, early)
    try:
        with refuse_model_on_error(name, f"transformers' own attention at position {last.start} failed"):
            logits, last_noise = _float32_logits(model, [last])
            return Reference([*exact, *logits], [*noise, *last_noise])
    except ModelRefused as refused:
        return Reference(exact, noise, refused)


def _float32_logits(
    model: PreTrainedModel, sequences: Sequence[ProbeSequence]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    with _in_float32(model):
        exact = _reference_batch(model, sequences)
    if token_embeddings(model).weight.dtype == torch.float32:
        return exact, [logits.new_zeros(len(logits)) for logits in exact]
    return exact, list(map(_differences, _reference_batch(model, sequences), exact))


def _in_float32(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Widen what is narrower; a model in float32 is spared the look at each of its operations."""
    return nullcontext() if token_embeddings(model).weight.dtype == torch.float32 else Float32()


def _reference_batch(model: PreTrainedModel, sequences: Sequence[ProbeSequence]) -> list[torch.Tensor]:
    """Logits of sequences with the same start, in one batch: each pass widens all weights."""
    start, length = sequences[0].start, max(len(sequence.tokens) for sequence in sequences)
    ids = torch.tensor(
        [sequence.tokens + [0] * (length - len(sequence.tokens)) for sequence in sequences], device=model.device
    )
    options: dict[str, Any] = {"use_cache": False}
    if start:
        count = model.config.get_text_config().num_hidden_layers
        layers: list[Any] = [_EmptyLayer(start) for _ in range(count)]
        positions = torch.arange(start, start + length, device=model.device)
        options = {"use_cache": True, "past_key_values": Cache(layers=layers), "position_ids": positions[None]}
    logits = model(input_ids=ids, **options).logits.float()
    return [row[: len(sequence.tokens)] for row, sequence in zip(logits, sequences, strict=True)]


class _EmptyLayer(DynamicLayer):
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
class _WindowFrom(AttentionWindow):
    start: int = 0

    def first(self, positions: torch.Tensor) -> torch.Tensor:
        earliest = AttentionWindow.first(self, positions)
        return torch.where(positions < self.start, earliest, earliest.clamp(min=self.start))


@torch.inference_mode()
def learn_attention(
    model: PreTrainedModel, name: str, context_length: int
) -> tuple[tuple[AttentionWindow, ...], tuple[LayerSpec, ...]]:
    """Replace the model's attention; return each layer's window and KV shape. Raises ModelRefused."""
    with refuse_model_on_error(name, "replacing its attention failed"):
        model.set_attn_implementation(NAME)
        layers = model.config.get_text_config().num_hidden_layers
    with mask_markers() as markers:
        recorder = Recorder(name, markers, context_length)
        with attending(recorder), refuse_model_on_error(name, "a pass with its attention replaced failed"):
            model(input_ids=_ids(model, probe_sequences(model, context_length)[0].tokens[:2]), use_cache=False)
            calls = calls_made()
    if calls != layers or not layers:
        reason = f"transformers' attention functions were called {calls} times for {layers} layers"
        raise ModelRefused(name, f"its attention can't be replaced: {reason}")
    _check_window(model, name, recorder.layer_windows, context_length)
    return tuple(recorder.layer_windows), tuple(recorder.specs)


def _check_window(
    model: PreTrainedModel, name: str, layer_windows: Sequence[AttentionWindow], context_length: int
) -> None:
    with refuse_model_on_error(name, "making transformers' own cache failed"):
        layers = DynamicCache(config=model.config).layers
    for index, (window, layer) in enumerate(zip(layer_windows, layers, strict=False)):
        kept = getattr(layer, "sliding_window", None) or context_length
        seen = context_length - int(window.first(torch.tensor(context_length - 1)))
        if seen > kept:
            raise ModelRefused(name, f"layer {index} sees {seen} tokens of a prompt, and {kept} from its cache")


@dataclass(frozen=True, slots=True)
class Subject:
    model: PreTrainedModel
    name: str
    context_length: int
    backend: Backend
    rounds_rows: bool = False
    """Whether linear layers round their inputs to int8."""

    def rows(self, layout: KvLayout) -> list[Row]:
        return _rows(probe_sequences(self.model, self.context_length), layout)


@torch.inference_mode()
def check_attention(
    subject: Subject, layout: KvLayout, layer_windows: Sequence[AttentionWindow], reference: Reference
) -> float:
    """Return the largest difference in float32 relative to the logits' spread. Raises ModelRefused."""
    float32_layout = KvLayout(layout.layers, layout.block_size, KvFormat(torch.float32.itemsize))
    name, rows = subject.name, subject.rows(layout)
    with refuse_model_on_error(name, "a step of several sequences failed"), _in_float32(subject.model):
        batched = _batched_logits(_runner(subject, float32_layout, layer_windows, rows, torch.float32), rows)
    worst = 0.0
    for actual, expected in zip(batched, reference.logits, strict=False):
        worst = max(worst, difference := _difference(actual, expected))
        if not difference < TOLERANCE[torch.float32]:
            where = " at the end of the context" if actual is batched[-1] else ""
            reason = f"its logits{where} differ from transformers' own by {difference:.2g} of their spread"
            raise ModelRefused(name, reason)
    if reference.failed is not None:
        raise reference.failed
    return worst


@torch.inference_mode()
def probe(subject: Subject, layout: KvLayout, layer_windows: Sequence[AttentionWindow], reference: Reference) -> bool:
    """Return whether a row as served has the same bits alone and in a batch. Raises ModelRefused."""
    dtype = token_embeddings(subject.model).weight.dtype
    name, rows = subject.name, subject.rows(layout)
    with refuse_model_on_error(name, "a step of several sequences failed"):
        runner = _runner(subject, layout, layer_windows, rows, dtype)
        batched, separate = _batched_logits(runner, rows), _separate_logits(runner, rows)
    pairs = [[(one[-len(other) :], other) for one, other in zip(batched, others, strict=True)] for others in separate]
    exact = all(torch.equal(one, other) for others in pairs for one, other in others)
    mixed = max(_median([_differences(one, other) for one, other in others]) for others in pairs)
    if not mixed < NEIGHBOURS[dtype] or (subject.backend.exact >= PARTS and not exact):
        raise ModelRefused(name, f"a sequence's logits depend on its neighbours, by {mixed:.2g} of their spread")
    rounded = list(map(_differences, batched, reference.logits))
    if subject.rounds_rows and layout.format.is_coded:
        plain = replace(layout, format=KvFormat(dtype.itemsize))
        apart = _batched_logits(_runner(subject, plain, layer_windows, rows, dtype), rows)
        _check_codes(name, list(map(_differences, batched, apart)), CODED_TOLERANCE, ("KV cache", "kv_dtype"))
    if subject.rounds_rows:
        _check_codes(name, rounded, ROUNDED_TOLERANCE, ("activations", "activations"))
    elif layout.format.is_coded:
        _check_codes(name, rounded, CODED_TOLERANCE, ("KV cache", "kv_dtype"))
    else:
        _check_rounding(name, dtype, rounded, reference.noise)
    return exact


def probe_step(
    subject: Subject, layout: KvLayout, layer_windows: Sequence[AttentionWindow]
) -> tuple[Callable[[], torch.Tensor], int]:
    """Return a step of all probe sequences that keeps the last position of each, and its number of tokens."""
    rows = subject.rows(layout)
    runner = _runner(subject, layout, layer_windows, rows, token_embeddings(subject.model).weight.dtype)
    lengths = [row.end - row.start for row in rows]

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return runner.logits([rows[-1], *rows[:-1]], np.cumsum([lengths[-1], *lengths[:-1]]) - 1)

    return run, sum(lengths)


def _check_codes(name: str, rounded: Sequence[torch.Tensor], tolerance: float, named: tuple[str, str]) -> None:
    """Raise ModelRefused where numbers in few bits change the logits too much; ``named``: they and their setting."""
    if not (typical := _median(rounded)) < tolerance:
        what, setting = named
        reason = f"its logits differ by {typical:.2g} of their spread (at most {tolerance})"
        raise ModelRefused(name, f"its {what} can't be in int8: {reason}; set {setting} to auto")


def _check_rounding(
    name: str, dtype: torch.dtype, rounded: Sequence[torch.Tensor], noise: Sequence[torch.Tensor]
) -> None:
    """Compare differences at each position of each sequence with those of transformers' own. Raises ModelRefused."""
    each = [([one], [other], OTHER_EXPERTS[dtype]) for one, other in zip(rounded, noise, strict=True)]
    for differences, own, tolerance in [(rounded, noise, TOLERANCE[dtype]), *each]:
        typical = _median(differences)
        if not typical < max(tolerance, NOISE_FACTOR * _median(own)):
            named = str(dtype).removeprefix("torch.")
            raise ModelRefused(name, f"its logits in {named} differ from float32 by {typical:.2g} of their spread")


def _runner(
    subject: Subject,
    layout: KvLayout,
    layer_windows: Sequence[AttentionWindow],
    rows: Sequence[Row],
    dtype: torch.dtype,
) -> ModelRunner:
    count = 1 + max(block for row in rows for blocks in row.blocks for block in blocks)
    store = subject.backend.make_store(layout, count, dtype)
    windows_from_start = [_WindowFrom(window.kind, window.size, rows[-1].start) for window in layer_windows]
    return ModelRunner(subject.model, store, windows_from_start, frozenset(), subject.backend)


def _batched_logits(runner: ModelRunner, rows: Sequence[Row]) -> list[torch.Tensor]:
    inverted = [rows[-1], *rows[:-1]]  # the longest context first
    lengths = [row.end - row.start for row in inverted]
    last, *others = runner.logits(inverted, np.arange(sum(lengths))).float().split(lengths)
    return [*others, last]


def _separate_logits(runner: ModelRunner, rows: Sequence[Row]) -> tuple[list[torch.Tensor], ...]:
    """Logits of each row in its own step, and of last positions: in a step that keeps only those, and decoded."""
    separate = [runner.logits([row], np.arange(row.end - row.start)).float() for row in rows]
    inverted = [rows[-1], *rows[:-1]]
    lengths = [row.end - row.start for row in inverted]
    final, *finals = runner.logits(inverted, np.cumsum(lengths) - 1).float().split(1)
    decodes = [row._replace(start=row.end - 1) for row in inverted]
    decode, *others = runner.logits(decodes, np.arange(len(decodes))).float().split(1)
    return separate, [*finals, final], [*others, decode]


def token_embeddings(model: PreTrainedModel) -> torch.nn.Embedding:
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Embedding)
    return embeddings


def _rows(sequences: Sequence[ProbeSequence], layout: KvLayout) -> list[Row]:
    """Rows of the sequences; positions before a start are in block 0, which no row sees."""
    rows, free = [], itertools.count(1)
    for index, sequence in enumerate(sequences):
        end = sequence.start + len(sequence.tokens)
        hidden = sequence.start // layout.block_size
        count = -(-end // layout.block_size) - hidden
        blocks = tuple(array("i", [0] * hidden + list(itertools.islice(free, count))) for _ in layout.groups)
        tokens = [0] * sequence.start + sequence.tokens
        rows.append(Row(Request(f"probe-{index}", tuple(sequence.tokens)), tokens, sequence.start, end, blocks, True))
    return rows


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).square().mean().sqrt() / expected.std().clamp(min=1e-9))


def _differences(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Root mean square difference at each position, relative to the spread of the sequence's logits."""
    return (actual - expected).square().mean(-1).sqrt() / expected.std().clamp(min=1e-9)


def _median(differences: Sequence[torch.Tensor]) -> float:
    return float(torch.cat(list(differences)).median())


def _ids(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([tokens], device=model.device)
