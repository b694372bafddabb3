import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import psutil
import pytest

from decant.command import demo
from decant.models import PROMPT
from tests.decant.supervisor_harness import nothing_left
from tests.e2e.deployment import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KERNELS = Path("decant", "engine", "cpu", "kernels")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("install")
    compiled = list((ROOT / KERNELS).glob("*.so"))
    built = folder / "build" / "lib"
    (built / KERNELS).mkdir(parents=True)
    for path in compiled:  # with its time: the build compiles only what is older than a source
        shutil.copy2(path, built / KERNELS)
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\ntouch {folder}/compiler-ran\nexit 1\n")
    compiler.chmod(0o755)
    settings = folder / "build.cfg"
    settings.write_text(f"[build]\nbuild_base = {built.parent}\nbuild_lib = {built}\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, ROOT],
        env=os.environ | {"DIST_EXTRA_CONFIG": str(settings), "CC": str(compiler), "CXX": str(compiler)},
        check=True,
        capture_output=True,
        timeout=2 * PATIENCE_S,
    )
    assert not (folder / "compiler-ran").exists(), "kernels that are newer than their sources were compiled again"
    (wheel,) = folder.glob("decant_llm-*.whl")
    assert wheel.name.endswith("-any.whl") != bool(compiled), "a wheel with extensions is of one platform"
    with zipfile.ZipFile(wheel) as archive:
        assert {str(KERNELS / path.name) for path in compiled} <= set(archive.namelist())
    environment = folder / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A plain path entry: the .pth files in there, this checkout's editable install among them, are not followed.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(environment / "bin" / "python"),
        "install",
        "-q",
        "--no-deps",
    ]
    subprocess.run([*install, "--force-reinstall", str(wheel)], check=True, capture_output=True, timeout=PATIENCE_S)
    return environment


def test_the_demo_of_the_wheel_shows_it_all_and_leaves_nothing(environment: Path, tmp_path: Path) -> None:
    before = {one.pid for one in psutil.process_iter()}
    variables = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    variables.pop("PYTHONPATH", None)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=2 * PATIENCE_S
        )

    python = str(environment / "bin" / "python")
    where = run(python, "-P", "-c", "from decant import router; print(router.__file__)")
    assert where.stdout.startswith(str(environment)), where
    done = run(str(environment / "bin" / "decant"), "demo")
    assert done.returncode == 0, done.stderr
    for part in ("def is_empty(self):", "prefill-1 -> decode-1", "adds up", demo.KILLED_MARK, demo.EQUAL):
        assert part in done.stdout
    question = done.stdout[done.stdout.index(PROMPT) :].partition("\ndecant status")[0]
    function, _, line = question.strip().rpartition("\n")
    assert ast.parse(function).body, "a whole function"
    assert re.search(r"\d+ tokens", line)
    left = [one for one in psutil.process_iter(["cmdline"]) if one.pid not in before]
    assert not [one for one in left if str(tmp_path) in " ".join(one.info["cmdline"] or [])]
    nothing_left([], tmp_path)
