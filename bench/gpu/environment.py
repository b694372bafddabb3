"""Print the machine, its GPU and the versions that measurements are made with: ``python -m bench.gpu.environment``."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata

import torch

PACKAGES = ("torch", "triton", "transformers", "numpy", "pytest")

LEAST = {"torch": (2, 11), "triton": (3, 6), "transformers": (5, 17)}


def main() -> int:
    print(f"python {platform.python_version()}, {os.cpu_count()} cores, {platform.platform()}")
    old = []
    for name in PACKAGES:
        version = metadata.version(name)
        print(f"{name} {version}")
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        if numbers < LEAST.get(name, (0, 0)):
            old.append(f"{name} {version} is older than {'.'.join(map(str, LEAST[name]))}")
    print(f"TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET', '')}")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        print(f"{properties.name}, {properties.multi_processor_count} processors, CUDA {torch.version.cuda}")
        print(f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free")
        query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
        try:
            print(subprocess.run(command, check=False, capture_output=True, text=True, timeout=20).stdout)
        except OSError as error:
            print(f"nvidia-smi: {error}")
    else:
        print("no GPU")
    print("\n".join(old), file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
