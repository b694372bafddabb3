"""Decoder layers in one compiled call, where they are shown to be the same: norm, attention, norm, gated layer.

Its linear layers, norms, rotation and attention are compiled already. What is left between them is the interpreter's:
dozens of calls a layer, and their code has to come back into caches through which the layer's weights have just gone.
For one sequence that was a quarter of a step.

    transformers' layer          __call__ -> norm -> q, k, v -> views -> rotation -> attention -> o -> + -> norm -> ...
    the same, in one             __call__ -> kernels.layers (engine/cpu/kernels/layer.h)

A layer is told by its parts, and tried: both run over the same rows and empty blocks, and the answers and what lies in
the blocks must be the same bits. It keeps its modules; only its ``forward`` is another, which still takes whatever it
can't do itself to the layer's own.

Nor does the interpreter stand between layers: who is asked computes those that follow it in the same call. They answer
with that when they are asked for just it, and else begin anew, and the one before foresees no more::

    model    layer 0 ── the same tensor, untouched ──> layer 1 ──> layer 2 ──> ...
    ours     0, 1, 2, ... computed                     known       known
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from decant.engine.cpu.attention import NativeAttention
from decant.engine.cpu.fused_ops import ROOM, TRIED_ON, GatedMlp, RmsNorm
from decant.engine.cpu.gemm import PackedWeight
from decant.engine.cpu.kernels import KERNELS
from decant.engine.cpu.linear import ANOTHER, PackedLinear
from decant.engine.cpu.threads import team
from decant.engine.kv_layout import KvLayout, LayerSpec
from decant.engine.model.attention import AttentionBackend, AttentionCall, attending, current, next_layer
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "q_norm", "k_norm", "post_attention_layernorm")
OPTIONAL = ("q_norm", "k_norm")
"""What the parts are called in nearly all models."""

TRIAL_BLOCK = 16
"""Slots of the block that a trial writes to."""
FAR = 1 << 20
"""Where a trial's rows stand, for a layer that asks: one that scales what is far is another."""
AHEAD = 32 << 20
"""Bytes of answers that are kept for layers that will ask; a long step of a wide model has fewer layers ahead."""

Forward = Callable[..., Any]


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_double))


class _Linear(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("weight", "bias")],
        *[(name, ctypes.c_int64) for name in ("inner", "outputs")],
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *[(name, _Norm) for name in NORMS],
        *[(name, _Linear) for name in LINEARS],
        *[(name, ctypes.c_int64) for name in ("heads", "kv_heads", "width")],
        *[(name, ctypes.c_double) for name in ("scaling", "softcap")],
    )


class _Precomputed(NamedTuple):
    """What a layer will answer, if it is asked just this."""

    by: FusedLayer
    hidden: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]
    attender: AttentionBackend
    answer: torch.Tensor

    def is_asked(self, hidden: torch.Tensor, angles: Any, attender: AttentionBackend | None) -> bool:
        """Whether it is that, and nobody has written to it since."""
        (cos, sin), attending = self.angles, self.attender
        return (
            hidden is self.hidden
            and hidden._version == 0
            and attender is attending
            and angles is not None
            and angles[0] is cos
            and angles[1] is sin
        )


class FusedLayer:
    """The forward of a decoder layer: hidden [1, T, hidden] -> the same."""

    def __init__(self, kernels: ModuleType, theirs: Forward, parts: _Parts, call: AttentionCall) -> None:
        self._kernel = kernels.layers
        self.theirs = theirs
        self.follower: FusedLayer | None = None
        """Whom the model asks next, with this one's answer: as far as is known."""
        self._foreseen: _Precomputed | None = None
        self._parts = parts  # whose memory is read
        self.dtype, self.width, self.hidden = call.query.dtype, call.query.shape[3], parts.panels[0].inner
        self._said = _Layer(
            *[_Norm() if norm is None else _Norm(norm.weight.data_ptr(), norm.eps) for norm in parts.norms],
            *[_Linear(*panels.addresses, panels.inner, panels.outputs) for panels in parts.panels],
            *(call.query.shape[1], call.key.shape[1], self.width),
            call.scaling,
            call.softcap or 0.0,
        )
        self._address = ctypes.addressof(self._said)

    def __call__(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        attender, angles = current(), named.get("position_embeddings")
        usual = not more and named.get("past_key_values") is None
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None:
            if usual and foreseen.is_asked(hidden_states, angles, attender):
                next_layer()
                return foreseen.answer
            foreseen.by.follower = None
        if (
            not usual
            or angles is None
            or not isinstance(attender, NativeAttention)
            or not self._fits(hidden_states, *angles)
        ):
            return self.theirs(hidden_states, *more, **named)
        return self._compute(hidden_states, angles, attender)

    def can_lead_to(self, other: FusedLayer) -> bool:
        """Whether that one takes what this one answers, and is asked in the same way."""
        return (self.dtype, self.width, self.hidden) == (other.dtype, other.width, other.hidden)

    def _compute(
        self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], attender: NativeAttention
    ) -> torch.Tensor:
        """Its answer, and those of the layers that follow."""
        layers = self._ahead(AHEAD // hidden.nbytes)
        with torch.inference_mode(False):  # a tensor that counts who writes to it
            memory = torch.empty(len(layers), *hidden.shape, dtype=self.dtype)
        turn = next_layer()
        turns = array("Q")  # as struct Turn
        for place, layer in enumerate(layers, turn):
            turns.extend((layer._address, *attender.addresses(place)))
        lies = [part.data_ptr() for part in (hidden, *angles, memory)]
        half, tokens = self.dtype == torch.bfloat16, hidden.shape[1]
        self._kernel(half, turns.buffer_info()[0], len(layers), attender.step, *lies, tokens, team())
        answers = memory.unbind()
        for (before, layer), (given, answer) in zip(pairwise(layers), pairwise(answers), strict=True):
            layer._foreseen = _Precomputed(before, given, angles, attender, answer)
        return answers[0]

    def _ahead(self, most: int) -> list[FusedLayer]:
        """Itself, and up to ``most`` in all with those that follow."""
        found = [self]
        while len(found) < most and (follower := found[-1].follower) is not None:
            if follower._foreseen is not None:  # what was foreseen last time was not asked
                found[-1].follower = None
            else:
                found.append(follower)
        return found

    def _fits(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether all lies as the kernel reads it."""
        laid_out = (1, hidden.shape[1], self.width)
        return (
            len(hidden) == 1
            and cos.shape == sin.shape == laid_out
            and hidden.dtype == cos.dtype == sin.dtype == self.dtype
            and hidden.is_contiguous()
            and cos.is_contiguous()
            and sin.is_contiguous()
        )


class _Parts:
    """Of a module that may be such a layer. Raises LookupError where one is missing, or of another kind."""

    def __init__(self, module: nn.Module) -> None:
        children = dict(module.named_children())
        found = {name: part for child in children.values() for name, part in child.named_children()} | children
        if not any(isinstance(child, GatedMlp) for child in children.values()):
            raise LookupError("its gated layer is another")
        self.norms = [_norm(found.get(name) if name in OPTIONAL else found[name]) for name in NORMS]
        self.panels = [_panels(found[name]) for name in LINEARS]
        self._check()

    def _check(self) -> None:
        """Whether each is as wide as what it is given and what it is added to; the kernel reads it so."""
        query, key, value, out, gate, up, down = self.panels
        before, _, _, after = self.norms
        assert before is not None
        assert after is not None
        alike = (
            {before.width, query.inner, key.inner, value.inner, out.outputs},
            {after.width, gate.inner, up.inner, down.outputs, out.outputs},
            {gate.outputs, up.outputs, down.inner},
            {query.outputs, out.inner},
            {key.outputs, value.outputs},
        )
        if any(len(widths) > 1 for widths in alike):
            raise LookupError("parts of other widths")

    def is_of(self, width: int) -> bool:
        """Whether its heads may be so wide."""
        query, key = self.panels[:2]
        fits = width > 0 and not query.outputs % width and not key.outputs % width
        return fits and all(norm is None or norm.width == width for norm in self.norms[1:3])


def _norm(part: nn.Module | None) -> RmsNorm | None:
    if part is not None and not isinstance(part, RmsNorm):
        raise LookupError("a norm of another kind")
    return part


def _panels(part: nn.Module) -> PackedWeight:
    panels = part.panels if isinstance(part, PackedLinear) else None
    if panels is None:
        raise LookupError("a linear layer of another kind")
    return panels


def fuse(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every decoder layer that does what ours does our forward; after ``small.fuse``."""
    if KERNELS is None or dtype not in ROOM:
        return
    found = []
    for module in model.modules():
        try:
            parts = _Parts(module)
        except LookupError:
            continue
        if (ours := _tried(module, parts, dtype)) is not None:
            module.forward = ours
            found.append(ours)
    for layer, follower in pairwise(found):
        if layer.can_lead_to(follower):
            layer.follower = follower
    for module in model.modules():
        if type(module) is nn.ModuleList and any(isinstance(child.forward, FusedLayer) for child in module):
            module.__class__ = _Layers


class _Layers(nn.ModuleList):
    """A list of which all is the list itself: models ask for all in each step, and making one of modules takes time."""

    def __getitem__(self, index: Any) -> Any:
        return self if index == slice(None, len(self)) else super().__getitem__(index)


def joined(model: nn.Module) -> list[tuple[nn.Module, FusedLayer]]:
    """The layers that run in one call, and how."""
    return [(module, module.forward) for module in model.modules() if isinstance(module.forward, FusedLayer)]


def apart(model: nn.Module) -> list[tuple[nn.Module, FusedLayer]]:
    """Have all layers run module by module again; ``module.forward = layer`` joins each that is answered."""
    found = joined(model)
    for module, layer in found:
        module.forward = layer.theirs
    return found


class _Noting:
    """Attends over heads of one shape, and keeps the call."""

    def __init__(self, attender: AttentionBackend, spec: LayerSpec) -> None:
        self._attender = attender
        self._spec = spec
        self.call: AttentionCall | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        spec = self._spec
        widths = call.query.shape[3], call.key.shape[3], call.value.shape[3]
        if widths != (spec.key_dim, spec.key_dim, spec.value_dim):
            raise ValueError("heads of another width")
        if not call.key.shape[1] == call.value.shape[1] == spec.kv_heads or call.query.shape[1] % spec.kv_heads:
            raise ValueError("another number of heads")
        self.call = call
        return self._attender.attend(call)


class _Trial:
    """Rows of small, usual and large numbers, to go through a layer over empty blocks."""

    def __init__(self, hidden: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
        count = len(TRIED_ON)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(1, count, hidden, generator=generator) * torch.tensor(TRIED_ON)[:, None]
        self._rows = rows.to(dtype)
        self._angles = tuple(torch.randn(1, count, width, generator=generator).to(dtype) for _ in range(2))
        self._positions = FAR + torch.arange(count)[None]
        self._spec = LayerSpec(kv_heads, width, width)
        self._layout = KvLayout((self._spec,), TRIAL_BLOCK, dtype.itemsize)
        tokens = list(range(count))
        self._step = [Row(Request("trial", tuple(tokens)), tokens, 0, count, array("i", [0]), True)]

    def of(self, forward: Forward) -> tuple[torch.Tensor, torch.Tensor, AttentionCall | None]:
        """What it answers, the blocks after it, and its call of attention where that was seen."""
        assert KERNELS is not None
        store = KvStore(self._layout, 1, self._rows.dtype, self._rows.device)
        step = NativeAttention(KERNELS, store, [AttentionWindow()], flatten(self._step, TRIAL_BLOCK, store.blank))
        noting = _Noting(step, self._spec)
        named = {"attention_mask": None, "position_ids": self._positions, "position_embeddings": self._angles}
        with attending(step if isinstance(forward, FusedLayer) else noting):
            answer = forward(self._rows, **named, use_cache=False)
        return answer, store.blocks, noting.call


@torch.inference_mode()
def _tried(module: nn.Module, parts: _Parts, dtype: torch.dtype) -> FusedLayer | None:
    """Our layer, where it gives the same bits as the module and leaves the same in the blocks."""
    assert KERNELS is not None
    theirs, key = module.forward, parts.panels[1]
    widths: list[Any] = [getattr(part, "head_dim", None) for part in module.children()]
    width = next((width for width in widths if isinstance(width, int)), 0)
    if not parts.is_of(width):
        return None
    trial = _Trial(key.inner, key.outputs // width, width, dtype)
    try:
        expected, blocks, call = trial.of(theirs)
    except ANOTHER:
        return None
    if not isinstance(expected, torch.Tensor) or call is None or call.sinks is not None:
        return None
    ours = FusedLayer(KERNELS, theirs, parts, call)
    answer, written, _ = trial.of(ours)
    return ours if torch.equal(answer, expected) and torch.equal(written, blocks) else None
