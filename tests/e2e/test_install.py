import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

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


def test_the_wheel_runs_a_deployment_and_asks_it(environment: Path, tmp_path: Path) -> None:
    decant = str(environment / "bin" / "decant")
    variables = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    variables.pop("PYTHONPATH", None)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [decant, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=PATIENCE_S
        )

    where = [str(environment / "bin" / "python"), "-P", "-c", "from decant import router; print(router.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(environment)), found.stdout
    up = subprocess.Popen(
        [decant, "up", "--port", "0", "--ready-seconds", str(PATIENCE_S)],
        cwd=tmp_path,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert up.stdout
        lines = []
        for line in up.stdout:
            lines.append(line)
            if '"ready"' in line and "address" in line:
                break
        else:
            pytest.fail("".join(lines))
        done = run("generate", "def add(a, b):\n", "--max-tokens", "12", "--json")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["text"]
        assert run("audit").returncode == 0
        assert run("status", "--json").returncode == 0
    finally:
        up.terminate()
        rest, _ = up.communicate(timeout=PATIENCE_S)
    assert up.returncode == 0, rest
    assert not list(tmp_path.iterdir())
