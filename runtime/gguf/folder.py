"""The model folder of a GGUF file, made once for each state of the file in the user's cache folder::

NAME-HASH/
  model.gguf               a link to the file
  model.gguf.index.json    its tensors under the model's names (tensors.py)
  config.json, generation_config.json, tokenizer.json, tokenizer_config.json
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decant.runtime.gguf.config import ROPE_FACTORS, architecture_of, make_config
from decant.runtime.gguf.reader import GgufHeader, GgufUnreadable, read_header
from decant.runtime.gguf.tensors import list_tensors
from decant.runtime.gguf.tokenizer import GgufTokenizer

WEIGHTS, INDEX = "model.gguf", "model.gguf.index.json"
_VERSION = 1
"""Of what is written from a file."""


def gguf_folder(file: Path) -> Path:
    """Return the folder of a file, made if missing. Raises GgufUnreadable, OSError if the cache can't be written."""
    folder = _cache() / _name(file.resolve())
    if not folder.is_dir():
        _make(file.resolve(), folder)
    return folder


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "decant" / "gguf"


def _name(file: Path) -> str:
    status = file.stat()
    state = _VERSION, str(file), status.st_size, status.st_mtime_ns, status.st_ino
    return f"{file.stem}-{hashlib.blake2b(repr(state).encode(), digest_size=6).hexdigest()}"


def _make(file: Path, folder: Path) -> None:
    contents = small_files(file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        for name, content in contents.items():
            (aside / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        (aside / WEIGHTS).symlink_to(file)
        aside.chmod(0o755)
        _rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _rename(aside: Path, folder: Path) -> None:
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process has made it
            raise


def small_files(file: Path) -> Mapping[str, Any]:
    """Make the contents of the JSON files by name. Raises GgufUnreadable, OSError."""
    header = read_header(file)
    architecture, tokenizer = architecture_of(header), GgufTokenizer(header.metadata)
    config = make_config(header, lambda: _factors(file, header))
    ends = tokenizer.eos_token_ids()
    return {
        "config.json": config,
        INDEX: list_tensors(header, architecture, config),
        "generation_config.json": {"eos_token_id": ends} if ends else {},
        "tokenizer.json": tokenizer.tokenizer_json(),
        "tokenizer_config.json": tokenizer.tokenizer_config(),
    }


def _factors(file: Path, header: GgufHeader) -> list[float]:
    place = header.tensors[ROPE_FACTORS]
    if place.type != "F32" or len(place.shape) != 1:
        raise GgufUnreadable(f"{ROPE_FACTORS} is {place.type} {list(place.shape)}: a list of F32")
    with file.open("rb") as stream:
        stream.seek(place.begin)
        return list(struct.unpack(f"<{place.shape[0]}f", stream.read(place.end - place.begin)))
