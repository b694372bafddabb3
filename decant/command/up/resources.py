from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from decant.command.errors import CommandFailed
from decant.engine.checkpoint import weight_files
from decant.engine.errors import ModelRefused
from decant.engine.kv_layout import HOST_KV_BYTES
from decant.plan.quantities import show_bytes
from decant.runtime.byte_size import parse_byte_size
from decant.runtime.model_files import local_folder

KV_FLOOR = 16 << 20
PROCESS_BYTES = 256 << 20
"""Memory of Python and torch in a worker."""
_KEPT_FREE = 0.25  # of the memory beside workers' code: steps, prompts, everything else on this machine
_REDIS_SHARE = 1 / 4  # of what is kept free
_REDIS_BYTES = 32 << 20, 256 << 20  # least and most
_COPIES = 1.5  # of the weights while they are loaded and packed
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def divide_cores(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    if len(cores) < workers:
        return [(cores[index % len(cores)],) for index in range(workers)]
    each, more = divmod(len(cores), workers)
    shares, begin = [], 0
    for index in range(workers):
        end = begin + each + (index < more)
        shares.append(tuple(cores[begin:end]))
        begin = end
    return shares


def kv_share(available: int, weights: int, workers: int) -> int:
    """Return the bytes of KV cache of each worker: less than `check_memory` accepts. Raises CommandFailed."""
    share = int((available - workers * PROCESS_BYTES) * (1 - _KEPT_FREE) / workers - weights * _COPIES)
    if share < KV_FLOOR:
        workers_text = "1 worker" if workers == 1 else f"{workers} workers"
        needed = f"{workers_text} with {show_bytes(weights)} of weights and {show_bytes(PROCESS_BYTES)} of code each"
        text = f"memory: {needed}, got {show_bytes(available)} that are free; start fewer, or pass --kv-memory"
        raise CommandFailed(text, status=2)
    return min(share, HOST_KV_BYTES)


def redis_limit(available: int) -> tuple[str, ...]:
    """Return the options of a private Redis: when it is full it refuses writes, and deletes nothing by itself."""
    least, most = _REDIS_BYTES
    limit = min(most, max(least, int(available * _KEPT_FREE * _REDIS_SHARE)))
    return ("--maxmemory", str(limit), "--maxmemory-policy", "noeviction")


def folder_of(model: str) -> Path | None:
    if (folder := local_folder(model)) is not None:
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def weights_size(model: str, dtype: str = "auto") -> int:
    """Return the bytes of the weights as `dtype`; 0 if they are unknown."""
    folder = folder_of(model)
    if folder is None:
        return 0
    try:
        config = weight_files.read_config(folder)
        stored = sum(file.stat().st_size for file in weight_files.weight_files(folder, config))
    except ModelRefused:
        return 0
    text = config.get("text_config") or config
    config_dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
    served_as = _ITEM_BYTES.get(dtype, _ITEM_BYTES.get(config_dtype, 4))
    return stored * served_as // _ITEM_BYTES.get(config_dtype, 4)


def parse_size(text: str, flag: str = "--kv-memory") -> int:
    try:
        return parse_byte_size(text)
    except ValueError as error:
        raise CommandFailed(f"{flag}: {error}", status=2) from None
