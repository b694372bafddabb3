"""Isolated source trees, environments and installs, which do not see this checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
UV = Path(sysconfig.get_path("scripts"), "uv")
"""Installs and builds in a third of pip's time. tests/e2e/test_install.py uses pip."""
OFFLINE = ("--no-build-isolation", "--offline", "--no-cache", "--no-config")
WITHOUT_KERNELS = {"CC": "false", "CXX": "false"}
"""Skips compiling the C++ kernels, which takes a minute."""

_BUILT = shutil.ignore_patterns("*_pb2*", "*.so", "__pycache__")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )


def succeed(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout
    return done.stdout


def copy_sources(names: Iterable[str], tree: Path) -> Path:
    tree.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=_BUILT)
        else:
            shutil.copy(ROOT / name, tree / name)
    return tree


def image_sources() -> list[str]:
    text = (ROOT / "deploy" / "Containerfile").read_text()
    copies = re.findall(r"^COPY (?!--from)(.+) [^/\s]\S*$", text, re.MULTILINE)
    return [name for line in copies for name in line.split()]


def site_packages(environment: Path) -> Path:
    paths = sysconfig.get_paths("venv", vars={"base": str(environment), "platbase": str(environment)})
    return Path(paths["purelib"])


def make_environment(environment: Path) -> Path:
    venv.create(environment, with_pip=False, symlinks=True)
    return environment / "bin" / "python"


def borrow_packages(environment: Path) -> None:
    """Make this environment's packages importable there, except editable installs.

    Python does not process .pth files in the folder of a path entry; an editable install is one.
    """
    (site_packages(environment) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def link_distribution(name: str, packages: Path) -> None:
    for file in distribution(name).files or ():
        if file.parts[0] == ".." or "__pycache__" in file.parts:
            continue
        # google/ is shared by several distributions; any other folder belongs to one.
        depth = 2 if file.parts[0] == "google" else 1
        link = packages.joinpath(*file.parts[:depth])
        if not link.exists():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(Path(str(distribution(name).locate_file("")), *file.parts[:depth]))


def install(python: Path, source: Path, *, editable: bool = False) -> subprocess.CompletedProcess[str]:
    what = ["--editable", source] if editable else [source]
    command = [UV, "pip", "install", "--python", python, "--no-deps", *OFFLINE, *what]
    return run(*command, cwd=source.parent, **WITHOUT_KERNELS)


def build_wheel(source: Path, folder: Path) -> Path:
    command: list[str | Path] = [
        UV,
        "build",
        "--wheel",
        "--python",
        sys.executable,
        *OFFLINE,
        "--out-dir",
        folder,
        source,
    ]
    succeed(*command, cwd=source.parent, **WITHOUT_KERNELS)
    (wheel,) = folder.glob("*.whl")
    return wheel


def build_sdist(tree: Path) -> Path:
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    succeed(sys.executable, "-c", build, cwd=tree, **WITHOUT_KERNELS)
    (archive,) = (tree / "dist").glob("*.tar.gz")
    return archive
