"""Adapters in PEFT's format: low-rank matrices that are added to the weights of a base model.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors`` with two matrices for each module::

    base_model.model.<module>.lora_A.weight   [rank, in]
    base_model.model.<module>.lora_B.weight   [out, rank]
    output += scaling * (input @ A.T) @ B.T
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from decant.engine.checkpoint.adapter_config import AdapterConfig, parse
from decant.engine.errors import AdapterRefused

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

MAX_CONFIG_BYTES = 1 << 20
MAX_BYTES = 4 << 30
"""Largest weight file that is read."""

_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": "down", ".lora_B.weight": "up"}
_OTHER_PARTS = {
    "lora_magnitude_vector": "it uses DoRA",
    "lora_embedding_": "it changes an embedding",
    ".bias": "it changes a bias",
}
_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LowRank:
    """Change of one weight [out, in]: ``scaling * up @ down``, of down [rank, in] and up [out, rank]."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def shape(self) -> tuple[int, int]:
        return self.up.shape[0], self.down.shape[1]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in memory. ``digest`` names its content: equal digests compute the same."""

    name: str
    config: AdapterConfig
    digest: str
    changes: Mapping[str, LowRank] = field(repr=False)
    """By module."""

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(change.rank for change in self.changes.values())


def read(name: str, folder: Path, max_bytes: int = MAX_BYTES) -> Adapter:
    """Read the folder of an adapter, each file once. Raises AdapterRefused."""
    if not folder.is_dir():
        raise AdapterRefused(name, f"{folder} is no folder")
    config = parse(name, _read_config(name, folder))
    changes = _pair(config, _read_tensors(name, folder, max_bytes))
    return Adapter(name, config, _digest(changes), changes)


def _read_config(name: str, folder: Path) -> Mapping[str, Any]:
    content = _read_file(name, folder / CONFIG, MAX_CONFIG_BYTES)
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(name, f"{CONFIG} can't be read: {error}") from None
    if not isinstance(raw, dict):
        raise AdapterRefused(name, f"{CONFIG} can't be read: it is no JSON object")
    return raw


def _read_tensors(name: str, folder: Path, max_bytes: int) -> Mapping[str, torch.Tensor]:
    if not (folder / WEIGHTS).exists() and (pickles := sorted(file.name for file in folder.glob("adapter_model.*"))):
        raise AdapterRefused(name, f"safetensors are needed; the folder has {pickles[0]}, and pickles can run code")
    content = _read_file(name, folder / WEIGHTS, max_bytes)
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise AdapterRefused(name, f"{WEIGHTS} can't be read as safetensors: {error}") from None


def _read_file(name: str, file: Path, max_bytes: int) -> bytes:
    """Read a file in one piece, so that one that is replaced meanwhile is read as either."""
    try:
        if not file.is_file():  # a pipe would block
            raise AdapterRefused(name, f"{file.parent} has no file {file.name}")
        with file.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except OSError as error:
        raise AdapterRefused(name, f"{file.name} can't be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise AdapterRefused(name, f"{file.name} has more than {max_bytes} bytes")
    return content


def _pair(config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, LowRank]:
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for tensor_name, tensor in sorted(tensors.items()):
        suffix = next((suffix for suffix in _PARTS if tensor_name.endswith(suffix)), None)
        if suffix is None or not tensor_name.startswith(_PREFIX):
            known = next((reason for part, reason in _OTHER_PARTS.items() if part in tensor_name), "it is no LoRA's")
            raise AdapterRefused(config.name, f"{WEIGHTS} has {tensor_name}: {known}, which is not served")
        _check_numbers(config.name, tensor_name, tensor)
        parts.setdefault(tensor_name[len(_PREFIX) : -len(suffix)], {})[_PARTS[suffix]] = tensor
    if not parts:
        raise AdapterRefused(config.name, f"{WEIGHTS} has no tensors")
    return {module: _low_rank(config, module, found) for module, found in parts.items()}


def _check_numbers(name: str, tensor_name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _DTYPES or tensor.dim() != 2:
        reason = f"{tensor_name} is {tensor.dtype} {list(tensor.shape)}, and a matrix of floats is needed"
        raise AdapterRefused(name, reason)
    if not bool(tensor.isfinite().all()):
        raise AdapterRefused(name, f"{tensor_name} has numbers that are not finite")


def _low_rank(config: AdapterConfig, module: str, parts: Mapping[str, torch.Tensor]) -> LowRank:
    for suffix, part in _PARTS.items():
        if part not in parts:
            raise AdapterRefused(config.name, f"{WEIGHTS} lacks {_PREFIX}{module}{suffix}")
    if not config.changes(module):
        raise AdapterRefused(config.name, f"{WEIGHTS} has {module}, which is not among its target_modules")
    down, up, rank = parts["down"], parts["up"], config.rank_of(module)
    if len(down) != rank or up.shape[1] != rank:
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise AdapterRefused(config.name, f"the matrices of {module} are {shapes}, and {CONFIG} says rank {rank}")
    return LowRank(down, up, config.scaling_of(module))


def _digest(changes: Mapping[str, LowRank]) -> str:
    """Digest of all that an adapter computes with: names, shapes, dtypes, scalings and numbers."""
    digest = hashlib.blake2b(digest_size=16, person=b"decant-lora")
    for module, change in sorted(changes.items()):
        facts = [
            module,
            change.scaling.hex(),
            *(f"{each.dtype} {list(each.shape)}" for each in (change.down, change.up)),
        ]
        digest.update("\0".join(facts).encode() + b"\0")
        for each in (change.down, change.up):
            digest.update(each.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
