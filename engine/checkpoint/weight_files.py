"""Check a model folder by its files alone, without torch and without reading weights.

A safetensors file: little-endian u64 length of the header; header, JSON of name -> dtype, shape and offsets; tensors.
The folder of a GGUF file has such a header beside it (gguf.py).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decant.engine.checkpoint import gguf, weight_shapes
from decant.engine.checkpoint.formats import find_format
from decant.engine.checkpoint.weight_format import FLOATS
from decant.engine.checkpoint.weight_shapes import Stored
from decant.engine.errors import ModelRefused

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

ADAPTERS = ("adapter_config.json", "adapter_model*")
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf")

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_MALFORMED = (AttributeError, LookupError, OSError, OverflowError, RecursionError, TypeError, ValueError, struct.error)
"""What reading a header raises that is not as safetensors writes it."""


def check(folder: Path) -> None:
    """Check configuration, format and headers of weights. Raises ModelRefused with the file and the reason."""
    if not folder.is_dir():
        raise ModelRefused(str(folder), "it is a file; a folder, a GGUF file or a hub name is needed")
    if not (folder / "config.json").is_file():
        check_adapters(folder, str(folder))  # a folder with only an adapter has no config.json
    config = read_config(folder)
    check_format(folder, config)
    check_weights(folder, config)


def check_format(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse adapters and unknown weight formats. Raises ModelRefused."""
    name = describe(folder, config)
    check_adapters(folder, name)
    find_format(name, config)


def check_adapters(folder: Path, name: str) -> None:
    if adapters := sorted(file.name for pattern in ADAPTERS for file in folder.glob(pattern)):
        reason = f"it has an adapter ({adapters[0]}): serve it beside its base model with --adapters NAME=FOLDER"
        raise ModelRefused(name, reason)


def check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    name = describe(folder, config)
    weight_format = find_format(name, config)
    tensors: dict[str, Stored] = {}
    for file in weight_files(folder, config):
        for tensor, entry in _header(name, file).items():
            dtype = str(entry.get("dtype"))
            if not weight_format.allows(tensor, dtype):
                raise ModelRefused(name, f"{dtype} weights are not served yet ({tensor} in {file.name})")
            tensors[tensor] = _stored(name, file, tensor, entry)
    weight_shapes.check(name, config, weight_format.model_tensors(tensors))


def _stored(name: str, file: Path, tensor: str, entry: Mapping[str, Any]) -> Stored:
    try:
        shape = tuple(int(count) for count in entry["shape"])
        begin, end = entry["data_offsets"]
        size = end - begin
    except _MALFORMED as error:
        raise ModelRefused(name, f"{file.name} can't be read as safetensors: {tensor}: {error!r}") from None
    width = FLOATS.get(str(entry.get("dtype")))
    if width is not None and size != width * math.prod(shape):
        reason = (
            f"{file.name} has {size} bytes of {tensor}, and its shape {list(shape)} needs {width * math.prod(shape)}"
        )
        raise ModelRefused(name, reason)
    return Stored(file.name, shape)


def has_weights(folder: Path) -> bool:
    """Whether the folder has weights of any format, or lists them."""
    return any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", INDEX, *ADAPTERS, *OTHER_WEIGHTS))


def weight_files(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """Find the weight files, sorted by name. Raises ModelRefused."""
    name = describe(folder, config)
    if "transformers_weights" in config:
        raise ModelRefused(name, f"config.json names weight files of its own (transformers_weights); use {SINGLE}")
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / gguf.INDEX).is_file():
        if not (folder / gguf.WEIGHTS).is_file():
            raise ModelRefused(name, f"the GGUF file that {gguf.WEIGHTS} is a link to is missing")
        return [folder / gguf.WEIGHTS]
    if not (folder / INDEX).is_file():
        raise ModelRefused(name, _no_weights(folder))
    shards = read_json(folder / INDEX, name).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(_is_name(shard) for shard in shards.values()):
        raise ModelRefused(name, f"{INDEX} has no weight_map of tensors to files")
    files = [folder / shard for shard in sorted(set(shards.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelRefused(name, f"{len(missing)} of {len(files)} weight files are missing, {missing[0]} among them")
    return files


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read config.json. Raises ModelRefused."""
    if not (folder / "config.json").is_file():
        raise ModelRefused(str(folder), "the folder has no config.json")
    return read_json(folder / "config.json", str(folder))


def read_json(file: Path, name: str) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(name, f"{_title(file)} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelRefused(name, f"{_title(file)} can't be read: it is no JSON object")
    return content


def describe(folder: Path, config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    return f"{named or 'an unnamed model type'} ({folder})"


def _title(file: Path) -> str:
    return "its configuration" if file.name == "config.json" else file.name


def _is_name(shard: object) -> bool:
    return isinstance(shard, str) and Path(shard).name == shard


def _no_weights(folder: Path) -> str:
    others = sorted(file.name for pattern in OTHER_WEIGHTS for file in folder.glob(pattern))
    tensors = sorted(file.name for file in folder.glob("*.safetensors"))
    if tensors:
        return f"there is no file named {SINGLE} or {INDEX}; the folder has {', '.join(tensors[:3])}"
    if not others:
        return "safetensors are needed; the folder has no weights"
    only = f"safetensors are needed; the folder has only {', '.join(others[:3])}"
    return only if others[0].endswith(".gguf") else f"{only}, and pickles can run code"


def _header(name: str, file: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        if file.name == gguf.WEIGHTS:
            return gguf.read_index(file)
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            content = json.loads(stream.read(min(length, _MAX_HEADER_BYTES)))
        content.pop("__metadata__", None)
        needed = 8 + length + max((int(entry["data_offsets"][1]) for entry in content.values()), default=0)
        size = file.stat().st_size
    except _MALFORMED as error:
        raise ModelRefused(name, f"{file.name} can't be read as safetensors: {error!r}") from None
    if size != needed:
        raise ModelRefused(name, f"{file.name} has {size} bytes, and its header says {needed}")
    entries: Mapping[str, Mapping[str, Any]] = content
    return entries
