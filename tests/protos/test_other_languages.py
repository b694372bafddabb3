from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

PROTOS = Path(__file__).parents[2] / "protos"
PUBLIC = ("inference.proto", "google/rpc/status.proto", "google/rpc/error_details.proto")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(PROTOS, tmp_path / "protos", ignore=shutil.ignore_patterns("*.py*", "__pycache__"))
    return tmp_path / "protos"


def compile_in(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", *arguments, *PUBLIC]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_every_language_s_compiler_gets_what_it_asks_for(folder: Path, tmp_path: Path) -> None:
    compile_in(folder, "--include_imports", f"--descriptor_set_out={tmp_path / 'set'}")
    files = {file.name: file for file in FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file}
    for name in PUBLIC:
        assert "/" in files[name].options.go_package, name  # protoc-gen-go takes no other
        assert files[name].options.java_package, name
        assert files[name].options.java_multiple_files, name
    assert files["inference.proto"].options.java_package != files["google/rpc/status.proto"].options.java_package


def test_python_compiles_from_our_folder_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    compile_in(folder, f"--python_out={out}", f"--grpc_python_out={out}")
    assert {path.name for path in out.glob("*.py")} == {"inference_pb2.py", "inference_pb2_grpc.py"}
    assert (out / "google/rpc/error_details_pb2.py").exists()


@pytest.mark.parametrize("language", ["cpp", "csharp", "java", "php", "ruby"])
def test_other_languages_compile_from_our_folder_alone(folder: Path, tmp_path: Path, language: str) -> None:
    protoc = shutil.which("protoc")
    if protoc is None:
        pytest.skip("needs protoc")
    out = tmp_path / "out"
    out.mkdir()
    command = [protoc, f"-I{folder}", f"--{language}_out={out}", *PUBLIC]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert list(out.rglob("*.*"))


def test_our_copies_are_those_that_python_uses() -> None:
    spec = find_spec("google.rpc")
    assert spec is not None
    installed = Path(next(iter(spec.submodule_search_locations or ())))
    for name in PUBLIC[1:]:
        ours, theirs = ((folder / Path(name).name).read_text() for folder in (PROTOS / "google/rpc", installed))
        assert ours.startswith("// Copyright")
        assert ours.partition("syntax =")[2] == theirs.partition("syntax =")[2]
