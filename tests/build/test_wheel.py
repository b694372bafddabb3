from __future__ import annotations

import json
import os
import sys
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest

from tests.build.environments import (
    ROOT,
    borrow_packages,
    build_sdist,
    build_wheel,
    copy_sources,
    image_sources,
    install,
    link_distribution,
    make_environment,
    run,
    site_packages,
    succeed,
)

pytestmark = pytest.mark.slow

DEPENDENCIES = ("grpcio", "protobuf", "googleapis-common-protos")
SERVERS = ("router", "worker", "prefill_worker", "decode_worker", "engine", "handoff", "state", "runtime", "protos")
FOLDERS = (*SERVERS, "models", "bench", "tests", "setup", "install")

CLIENT_PROGRAM = """
import json, sys
before = set(sys.modules)
import decant
with decant.Client("localhost:1"):
    pass
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy_sources(image_sources(), tmp_path_factory.mktemp("sources") / "tree")
    for weights in tree.glob("models/*/*.safetensors"):
        weights.write_text("no test here loads them, and each archive would compress them")
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    environment = tmp_path_factory.mktemp("client") / "environment"
    python = make_environment(environment)
    for name in (*DEPENDENCIES, "typing-extensions"):
        link_distribution(name, site_packages(environment))
    done = install(python, wheel)
    assert done.returncode == 0, done.stdout
    return environment


def members(wheel: Path) -> dict[str, int]:
    """Checksums of a wheel's files, without RECORD, whose order varies."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist() if not info.filename.endswith("/RECORD")}


def test_the_wheel_installs_one_top_level_name(environment: Path) -> None:
    dist_info = f"decant_llm-{version('decant-llm')}.dist-info"
    top_level = {
        path.name for path in site_packages(environment).iterdir() if not path.is_symlink() and path.name != "google"
    }
    assert top_level == {"decant", dist_info}
    assert {path.name for path in (environment / "bin").iterdir()} >= {"decant"}
    of_venv_and_uv = {"bin", "lib", "lib64", "include", "pyvenv.cfg", ".lock"}
    assert not {path.name for path in environment.iterdir()} - of_venv_and_uv


def test_the_client_needs_grpcio_and_protobuf_only(environment: Path, tmp_path: Path) -> None:
    loaded = set(json.loads(succeed(environment / "bin" / "python", "-c", CLIENT_PROGRAM, cwd=tmp_path)))
    assert "decant" in loaded
    others = {name for name in loaded - sys.stdlib_module_names if not name.startswith("_")}
    assert others <= {"decant", "grpc", "google", "typing_extensions", "cygrpc", "cython_runtime"}
    plain = [line.partition(";")[0] for line in requires("decant-llm") or () if "extra ==" not in line]
    assert {line.partition("<")[0].partition(">")[0].strip() for line in plain} == set(DEPENDENCIES)


def test_folders_of_the_repository_are_no_import_names(environment: Path, tmp_path: Path) -> None:
    find = "import importlib.util, sys; print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    assert succeed(environment / "bin" / "python", "-c", find, *FOLDERS, cwd=tmp_path).strip() == "[]"


def test_every_package_of_the_repository_is_found_under_decant(environment: Path) -> None:
    packages = site_packages(environment) / "decant"
    assert not any(path.is_symlink() for path in packages.rglob("*"))
    for name in (*SERVERS, "models", "client", "command"):
        assert (packages / name / "__init__.py").exists()
    assert (packages / "py.typed").exists()


def test_packages_of_a_user_with_the_same_names_keep_working(environment: Path, tmp_path: Path) -> None:
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'user'\n")
    imports = "\n".join(f"import {name}; assert {name}.OWNER == 'user', {name}" for name in FOLDERS)
    program = f"{imports}\n{CLIENT_PROGRAM}\nimport decant.engine.scheduler, decant.runtime.errors\n{imports}\n"
    (tmp_path / "program.py").write_text(program)
    succeed(environment / "bin" / "python", "program.py", cwd=tmp_path)


def test_the_command_names_the_extra_that_it_needs(environment: Path, tmp_path: Path) -> None:
    done = run(environment / "bin" / "decant", "--help", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.strip() == "decant: typer is not installed; pip install 'decant-llm[router]' brings it"


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tree: Path, tmp_path: Path) -> None:
    assert members(build_wheel(build_sdist(tree), tmp_path)) == members(wheel)


def test_an_editable_install_follows_the_links(tree: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment")
    borrow_packages(tmp_path / "environment")
    done = install(python, tree, editable=True)
    assert done.returncode == 0, done.stdout
    where = "import decant.engine, os; print(os.path.realpath(decant.engine.__file__))"
    assert succeed(python, "-c", where, cwd=tmp_path).strip() == str(tree / "engine" / "__init__.py")


def test_links_lead_to_folders_beside_decant() -> None:
    links = [path for path in (ROOT / "decant").iterdir() if path.is_symlink()]
    assert {link.name for link in links} == {*SERVERS, "models"}
    assert all(os.readlink(link) == f"../{link.name}" for link in links)
