import re
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.build.environments import (
    ROOT,
    borrow_packages,
    build_sdist,
    copy_sources,
    install,
    make_environment,
    run,
    succeed,
)

pytestmark = pytest.mark.slow

BUILD_INPUTS = ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md", "protos", "decant/__init__.py")
STUBS = (
    "decant.protos.inference_pb2",
    "decant.protos.inference_pb2_grpc",
    "decant.protos.worker_pb2",
    "decant.protos.worker_pb2_grpc",
)
VLLM_STUB = "decant.protos.vllm.vllm_engine_pb2_grpc"

INSTALLS = pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "decant").mkdir(parents=True)
    (tree / "decant" / "protos").symlink_to("../protos")
    return copy_sources(BUILD_INPUTS, tree)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    python = make_environment(tmp_path / "environment")
    borrow_packages(tmp_path / "environment")
    return python


def where_stubs_are(python: Path, cwd: Path) -> set[Path]:
    imports = f"import importlib\nfor m in {STUBS}: print(importlib.import_module(m).__file__)"
    return {Path(line).parent for line in succeed(python, "-c", imports, cwd=cwd).split()}


@INSTALLS
def test_an_install_has_the_stubs(python: Path, tree: Path, tmp_path: Path, editable: bool) -> None:
    done = install(python, tree, editable=editable)
    assert done.returncode == 0, done.stdout

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (found,) = where_stubs_are(python, elsewhere)
    environment = tree if editable else python.parents[1]
    assert found.is_relative_to(environment)
    assert (found / "inference_pb2.pyi").exists()
    assert (found / "py.typed").exists()
    assert (found / "inference.proto").exists()
    assert (found / "google/rpc/error_details.proto").exists()
    assert (found / "vllm/vllm_engine_pb2.pyi").exists()
    assert (found / "vllm/LICENSE").exists()
    assert (found / "kserve/grpc_service_pb2.pyi").exists()
    assert (found / "kserve/LICENSE").exists()
    succeed(python, "-c", f"import {VLLM_STUB}", cwd=elsewhere)
    where = run(python, "-c", "from google.rpc import status_pb2; print(status_pb2.__file__)", cwd=elsewhere)
    assert not Path(where.stdout.strip()).is_relative_to(found)


def test_the_stubs_work_with_the_oldest_versions_that_the_dependencies_allow() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = dict(re.findall(r"(grpcio|protobuf)>=([\d.]+)", " ".join(project["dependencies"])))
    numbers = ", ".join(oldest["protobuf"].split("."))
    stubs = [
        stub for folder in ("protos", "protos/kserve", "protos/vllm") for stub in (ROOT / folder).glob("*_pb2*.py")
    ]
    assert len(stubs) >= 10
    for stub in stubs:
        text = stub.read_text()
        is_grpc = stub.name.endswith("_grpc.py")
        checked = f"GRPC_GENERATED_VERSION = '{oldest['grpcio']}'" if is_grpc else f"PUBLIC, {numbers}, '',"
        assert checked in text, stub


@INSTALLS
def test_a_proto_that_does_not_compile_fails_the_install(python: Path, tree: Path, editable: bool) -> None:
    broken = tree / "protos" / "worker.proto"
    broken.write_text(broken.read_text() + "\nmessage Unfinished {\n")

    done = install(python, tree, editable=editable)
    assert done.returncode != 0
    assert "protoc failed on" in done.stdout
    assert "decant/protos/worker.proto:" in done.stdout  # the faulty file, not one that imports it


def test_stubs_of_a_removed_proto_are_not_shipped(python: Path, tree: Path, tmp_path: Path) -> None:
    stale = tree / "protos" / "removed_pb2.py"
    stale.write_text("")

    assert install(python, tree).returncode == 0
    (found,) = where_stubs_are(python, tmp_path)
    assert not (found / stale.name).exists()


def test_an_sdist_carries_protos_and_installs(python: Path, tree: Path, tmp_path: Path) -> None:
    (tree / "protos" / "inference_pb2.py").write_text("stale")
    archive = build_sdist(tree)
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {
        "setup.py",
        *(f"decant/protos/{name}" for name in ("inference.proto", "worker.proto", "google/rpc/status.proto")),
    } <= names
    assert not any("_pb2" in name for name in names)

    done = install(python, archive)
    assert done.returncode == 0, done.stdout
    where_stubs_are(python, tmp_path)
