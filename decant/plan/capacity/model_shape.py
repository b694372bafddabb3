from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decant.engine.kv_layout import BLOCK_SIZE, INT8_KV, KvFormat, KvLayout, LayerSpec
from decant.plan.errors import InvalidPlan
from decant.plan.quantities import parse_count

if TYPE_CHECKING:
    from decant.engine.model.outline import ModelOutline

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}
"""Bytes of an element; int4 has a two-byte scale for each group of 128."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_REQUIRED = ("layers", "hidden", "heads")
_KEYS = (*_REQUIRED, "kv_heads", "head_dim", "intermediate", "vocab", "params")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a model, in elements.

    params        of the whole model
    embeddings    parameters in tables from which a token takes a row
    tied          those of them that are the head too
    active        parameters that a token is multiplied with
    layers        KV of each layer
    context       in tokens; None: unlimited
    quantization  of the weights in the files; None: they are plain
    """

    name: str
    params: int
    embeddings: int
    tied: int
    active: int
    heads: int
    layers: tuple[LayerSpec, ...]
    context: int | None = None
    quantization: str | None = None

    @property
    def linear(self) -> int:
        return self.params - self.embeddings

    @property
    def pair_operations(self) -> int:
        """Operations in all layers for a query and a key that it sees."""
        return sum(2 * self.heads * (layer.key_dim + layer.value_dim) for layer in self.layers)

    def weight_bytes(self, dtype: str, quantization: str | None = None) -> int:
        return int(self.linear * BYTES[quantization or dtype] + self.embeddings * BYTES[dtype])

    def step_bytes(self, dtype: str, quantization: str | None = None) -> int:
        """Return the bytes of weights that a step reads: without tables that only serve look-ups."""
        return int(self.linear * BYTES[quantization or dtype] + self.tied * BYTES[dtype])

    def kv_bytes(self, kv_dtype: str) -> int:
        """Return the KV bytes of a token in all layers."""
        layout = self.kv_layout(kv_dtype)
        return sum(layout.slot_elements) * layout.format.itemsize

    def kv_layout(self, kv_dtype: str) -> KvLayout:
        return KvLayout(self.layers, BLOCK_SIZE, INT8_KV if kv_dtype == "int8" else KvFormat(int(BYTES[kv_dtype])))

    def document(self) -> dict[str, Any]:
        """Return the shape for JSON, with layers of equal KV counted."""
        kinds = [
            {
                "layers": count,
                **asdict(layer),
                "window": {"kind": layer.window.kind.value, "size": layer.window.size},
            }
            for layer, count in Counter(self.layers).items()
        ]
        return {
            **{name: getattr(self, name) for name in ("name", "params", "embeddings", "tied", "active", "heads")},
            "layers": len(self.layers),
            "kv": kinds,
            "context": self.context,
        }


def find_shape(model: str) -> ModelShape:
    """Find the shape of a folder, a config.json, a GGUF file, or a name on the Hugging Face hub, from which only a
    config.json is downloaded.

    Raises InvalidPlan, and ModelRefused for what a worker refuses.
    """
    if Path(model).suffix == ".gguf" and Path(model).is_file():
        return _read_gguf(Path(model))
    if Path(model).exists() or not _HUB_NAME.fullmatch(model):
        return read_shape(Path(model))
    try:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        from decant.runtime.model_files import download
    except ImportError as error:
        raise InvalidPlan("--model", f"a folder or a config.json; for names on the hub, {error.name}", model) from None
    try:
        disable_progress_bars()
        # Not hf_hub_download, which repeats a failed request for 24 s.
        folder = download(model, None, ["config.json"])
    except Exception as error:  # noqa: BLE001 - HTTP clients and proxies raise errors of their own
        reason = str(error).strip().partition("\n")[0]
        limit = f"a folder, a config.json, or a model on the Hugging Face hub ({reason})"
        raise InvalidPlan("--model", limit, model) from None
    if not (folder / "config.json").is_file():
        raise InvalidPlan("--model", "a model with a config.json", model)
    return _outlined(folder / "config.json", model, model)


def read_shape(path: Path) -> ModelShape:
    """Find the shape of a config.json, or of the one in a folder. Raises InvalidPlan and ModelRefused."""
    file = path / "config.json" if path.is_dir() else path
    return _outlined(file, str(path), file.parent.resolve().name)


def _read_gguf(file: Path) -> ModelShape:
    from decant.runtime.model_files import ModelUnreadable, local_folder  # of the extra "router"

    try:
        folder = local_folder(str(file))
    except ModelUnreadable as error:
        raise InvalidPlan("--model", f"a GGUF file that is served ({error.reason})", file) from None
    assert folder is not None
    return _outlined(folder / "config.json", str(folder), file.stem)


def _outlined(file: Path, model: str, name: str) -> ModelShape:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidPlan("--model", f"a folder or a config.json ({error.strerror})", file) from None
    except (ValueError, RecursionError) as error:
        raise InvalidPlan("--model", f"a JSON object in {file.name} ({error})", file) from None
    if not isinstance(config, dict):
        raise InvalidPlan("--model", f"a JSON object in {file.name}", type(config).__name__)
    try:
        from decant.engine.model.outline import read_outline
    except ModuleNotFoundError as error:
        limit = f"with the packages of decant-llm[worker], of which {error.name} is missing; or --shape instead"
        raise InvalidPlan("--model", limit, model) from None
    return from_outline(name, read_outline(file, model))


def from_outline(name: str, outline: ModelOutline) -> ModelShape:
    """Return the shape; where experts are chosen in an unknown way, all of them count as active."""
    active = outline.active
    if active is None:
        active = outline.params - outline.embeddings + outline.tied
    return ModelShape(
        name,
        outline.params,
        outline.embeddings,
        outline.tied,
        active,
        outline.heads,
        outline.layers,
        outline.context_length,
        outline.quantization,
    )


def parse_shape(text: str) -> ModelShape:
    dims: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in _KEYS:
            raise InvalidPlan("--shape", f"keys {', '.join(_KEYS)}", part.strip() or "nothing")
        dims[key] = parse_count(f"--shape {key}", value)
    if missing := [key for key in _REQUIRED if key not in dims]:
        raise InvalidPlan("--shape", f"at least {', '.join(_REQUIRED)}", f"no {', '.join(missing)}")
    layers, hidden, heads = (dims[key] for key in _REQUIRED)
    kv_heads, head_dim = dims.get("kv_heads", heads), dims.get("head_dim", hidden // heads)
    if not head_dim:
        raise InvalidPlan("hidden", f"at least 1 for each of {heads:,} heads", hidden)
    if heads % kv_heads:
        raise InvalidPlan("kv_heads", f"a divisor of {heads} heads", kv_heads)
    table = dims.get("vocab", 32000) * hidden
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * dims.get("intermediate", 4 * hidden)
    params = dims.get("params", layers * (attention + mlp) + 2 * table)
    if params <= 2 * table:
        raise InvalidPlan("--shape params", f"more than table and head have ({2 * table:,})", params)
    specs = (LayerSpec(kv_heads, head_dim, head_dim),) * layers
    return ModelShape(text, params, table, tied=0, active=params - table, heads=heads, layers=specs)
