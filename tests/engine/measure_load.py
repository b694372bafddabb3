"""Prints how much private memory a load takes: at most (``peak``), and when it has ended (``end``).

python -m tests.engine.measure_load FOLDER DTYPE
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch

from decant.engine.loading import load
from decant.engine.model.model import ModelConfig


def held() -> int:
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def main() -> None:
    torch.set_num_threads(1)
    before, done = held(), threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(held())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        _device = load(ModelConfig(sys.argv[1], dtype=sys.argv[2], device="cpu", context_length=64, kv_bytes=1 << 20))
    finally:
        done.set()
        watching.join()
    print(json.dumps({"peak": max(seen) - before, "end": held() - before}))


if __name__ == "__main__":
    main()
