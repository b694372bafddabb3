"""Every kind of install carries the stubs, and none succeeds when a .proto doesn't compile."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUILD_INPUTS = ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md", "protos")
STUBS = (
    "decant.protos.inference_pb2",
    "decant.protos.inference_pb2_grpc",
    "decant.protos.worker_pb2",
    "decant.protos.worker_pb2_grpc",
)

INSTALLS = pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run with nothing of this process's import path; the output is one string, errors included."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The sources that a build reads, without what an earlier build left in them."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
        else:
            shutil.copy(source, tree)
    (tree / "decant").mkdir()
    shutil.copy(ROOT / "decant" / "__init__.py", tree / "decant")
    (tree / "decant" / "protos").symlink_to("../protos")
    return tree


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of a new environment that sees this one's packages, but not our editable install.

    A path entry doesn't process the .pth files that it holds, and an editable install is one.
    """
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    paths = sysconfig.get_paths("venv", vars={"base": str(home), "platbase": str(home)})
    Path(paths["purelib"], "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "python"


def install(python: Path, source: Path, *, editable: bool) -> subprocess.CompletedProcess[str]:
    flags = ["--no-deps", "--no-build-isolation", "--ignore-installed", "--no-index"]
    what = ["--editable", source] if editable else [source]
    return run(sys.executable, "-m", "pip", "--python", python, "install", *flags, *what, cwd=source.parent)


def where_stubs_are(python: Path, cwd: Path) -> set[Path]:
    imports = f"import importlib\nfor m in {STUBS}: print(importlib.import_module(m).__file__)"
    done = run(python, "-c", imports, cwd=cwd)
    assert done.returncode == 0, done.stdout
    return {Path(line).parent for line in done.stdout.split()}


@INSTALLS
def test_an_install_has_the_stubs(python: Path, tree: Path, tmp_path: Path, editable: bool) -> None:
    done = install(python, tree, editable=editable)
    assert done.returncode == 0, done.stdout

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (found,) = where_stubs_are(python, elsewhere)
    home = tree if editable else python.parents[1]
    assert found.is_relative_to(home)
    assert (found / "inference_pb2.pyi").exists()
    assert (found / "py.typed").exists()
    assert (found / "inference.proto").exists()
    assert (found / "google/rpc/error_details.proto").exists()
    where = run(python, "-c", "from google.rpc import status_pb2; print(status_pb2.__file__)", cwd=elsewhere)
    assert not Path(where.stdout.strip()).is_relative_to(found)


@INSTALLS
def test_a_proto_that_does_not_compile_fails_the_install(python: Path, tree: Path, editable: bool) -> None:
    broken = tree / "protos" / "worker.proto"
    broken.write_text(broken.read_text() + "\nmessage Unfinished {\n")

    done = install(python, tree, editable=editable)
    assert done.returncode != 0
    assert "protoc failed on" in done.stdout
    assert "decant/protos/worker.proto:" in done.stdout  # where the fault is, whichever file imports it


def test_stubs_of_a_removed_proto_are_not_shipped(python: Path, tree: Path, tmp_path: Path) -> None:
    stale = tree / "protos" / "removed_pb2.py"
    stale.write_text("")

    assert install(python, tree, editable=False).returncode == 0
    (found,) = where_stubs_are(python, tmp_path)
    assert not (found / stale.name).exists()


def test_an_sdist_carries_protos_and_installs(python: Path, tree: Path, tmp_path: Path) -> None:
    (tree / "protos" / "inference_pb2.py").write_text("stale")
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    done = run(sys.executable, "-c", build, cwd=tree)
    assert done.returncode == 0, done.stdout

    (archive,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {
        "setup.py",
        *(f"decant/protos/{name}" for name in ("inference.proto", "worker.proto", "google/rpc/status.proto")),
    } <= names
    assert not any("_pb2" in name for name in names)

    done = install(python, archive, editable=False)
    assert done.returncode == 0, done.stdout
    where_stubs_are(python, tmp_path)
