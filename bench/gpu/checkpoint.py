"""Write a checkpoint of random weights in the shape of a model, to serve it without a download:

    python -m bench.gpu.checkpoint llama-3.1-8b /dev/shm/model --device cuda
    decant up --model /dev/shm/model --dtype bfloat16 --kv-memory 21G
    decant bench --concurrency 64 --requests 64 --prompt-tokens 1500-2000 --output-tokens 500

The tokenizer is that of the packaged model; ids that it does not have are shown as no text.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from bench.gpu import shapes
from decant.engine.backends import choose_device
from decant.engine.errors import InvalidConfig

CONTEXT_LENGTH = 8192

TOKENIZER = Path(__file__).parents[2] / "models/tiny-python"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.checkpoint", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("shape", choices=shapes.NAMES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help="where the weights are made: cpu, cuda or cuda:N")
    args = parser.parse_args(arguments)
    try:
        device = choose_device(args.device)
    except InvalidConfig as error:
        parser.error(f"--device: {error}")
    model = shapes.make_model(args.shape, CONTEXT_LENGTH, device)
    model.save_pretrained(args.folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, args.folder)
    size = sum(path.stat().st_size for path in args.folder.iterdir())
    print(json.dumps({"shape": args.shape, "folder": str(args.folder), "bytes": size}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
