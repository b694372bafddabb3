import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "engine/cpu/kernels", tmp_path / "decant/engine/cpu/kernels", ignore=ignored)
    return tmp_path


@pytest.mark.slow
def test_kernels_that_can_not_be_compiled_are_left_out(tree: Path) -> None:
    environment = {**os.environ, "CC": "false", "CXX": "false"}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not list(tree.glob("decant/engine/cpu/kernels/*.so"))


@pytest.mark.parametrize("is_built", [False, True])
def test_make_setup_says_when_there_are_no_kernels(tree: Path, is_built: bool) -> None:
    environment = tree / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").touch()
    (tree / "protos").mkdir()
    for name in ("requirements.lock", "install.py", "environment/.installed"):
        (tree / name).touch()
    if is_built:
        (tree / "engine/cpu/kernels").mkdir(parents=True)
        (tree / "engine/cpu/kernels" / "_kernels.cpython-311-x86_64-linux-gnu.so").touch()
    make = ["make", "setup", f"VENV={environment}", "PIP=true"]
    done = subprocess.run(make, cwd=tree, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("C++ kernels: not built")]
    assert len(lines) == (0 if is_built else 1)
