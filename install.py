"""Install Decant's development dependencies into the environment that runs this script; `make setup` calls it.

    python install.py [--with uv|pip]

Installs torch first, then the versions in requirements.lock. Uses the uv on PATH or installs it into the environment.
pip's settings (index, find-links) also apply to uv. Unless they, UV_TORCH_BACKEND or TORCH_INDEX choose a build of
torch, a machine without an NVIDIA driver gets the CPU build.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

LOCK = Path(__file__).parent / "requirements.lock"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP_SETTINGS = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
"""uv's options of the same meaning."""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def pip_settings(listing: str) -> dict[str, list[str]]:
    """Parse the output of ``pip config list``; environment variables (``:env:``) win."""
    settings: dict[str, list[str]] = {}
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2].strip()
        if key in PIP_SETTINGS:
            settings[key] = value.strip().strip("'\"").replace("\\n", " ").split()
    return settings


def uv_options(settings: Mapping[str, list[str]]) -> list[str]:
    options = [text for key, values in settings.items() for value in values for text in (PIP_SETTINGS[key], value)]
    # pip takes the best version of all indexes; uv's default takes the first index that knows the package.
    return [*options, "--index-strategy", "unsafe-best-match"] if options else []


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def torch_source(installer: str, settings: Mapping[str, list[str]], environment: Mapping[str, str]) -> list[str]:
    if index := environment.get("TORCH_INDEX"):
        if installer == "pip":
            return ["--index-url", index]
        # uv takes one default index and searches each --index before it.
        return ["--index" if "index-url" in settings else "--default-index", index]
    is_chosen = settings or any(environment.get(name) for name in ("UV_TORCH_BACKEND", "UV_INDEX", "UV_DEFAULT_INDEX"))
    if is_chosen or not sys.platform.startswith("linux") or has_nvidia_driver():
        return []
    return ["--torch-backend", "cpu"] if installer == "uv" else ["--extra-index-url", CPU_INDEX]


def locked(package: str) -> str:
    return next(line for line in LOCK.read_text().splitlines() if line.startswith(f"{package}=="))


def find_uv() -> str:
    if on_path := shutil.which("uv"):
        return on_path
    own = Path(sys.executable).with_name("uv")
    if not own.exists():
        stage(locked("uv"), lambda: subprocess.run([*PIP, "install", "--quiet", locked("uv")], check=True))
    return str(own)


def stage(title: str, run: Callable[[], object]) -> None:
    print(f"{title} ...", flush=True)
    began = time.monotonic()
    run()
    print(f"{title}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Install what Decant needs for development.")
    parser.add_argument("--with", dest="installer", choices=("uv", "pip"), default="uv")
    installer = parser.parse_args().installer
    settings = pip_settings(subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout)
    if installer == "uv":
        install = [find_uv(), "pip", "install", "--quiet", "--python", sys.executable]
        options = uv_options(settings)
    else:
        install, options = [*PIP, "install", "--quiet"], []

    def run(*arguments: str) -> None:
        command = [*install, *arguments, *options]  # an index in the arguments is searched before those of the options
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            sys.exit(f"install.py: {' '.join(command)}: exit status {done.returncode}")

    source = torch_source(installer, settings, os.environ)
    # torch by version first: otherwise a transitive dependency may choose another build.
    stage(f"torch from {source[-1] if source else 'the configured index'}", lambda: run(*source, locked("torch")))
    stage(f"packages of {LOCK.name}, with {installer}", lambda: run("--requirement", str(LOCK)))


if __name__ == "__main__":
    main()
