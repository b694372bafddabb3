from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from tests.deploy.rendering import ROOT, needs_kustomize, overlay, pod

TEXT = (ROOT / "deploy" / "Containerfile").read_text()


def test_every_package_is_in_the_image() -> None:
    packages = {init.parent.name for init in ROOT.glob("*/__init__.py")} - {"tests", "bench"}
    ignored = (ROOT / ".containerignore").read_text().splitlines()
    for package in packages:
        assert f"\nCOPY {package} {package}\n" in TEXT
        assert f"!{package}" in ignored


@needs_kustomize
def test_the_user_of_the_image_is_the_one_that_pods_run_as() -> None:
    stages = [re.findall(r"^USER (\d+):\d+$", stage, re.MULTILINE) for stage in TEXT.split("\nFROM ")]
    users = {int(named[-1]) for named in stages if named}
    processes = overlay("cpu-demo").processes.values()
    assert {pod(one)["securityContext"]["runAsUser"] for one in processes} == users


def test_the_extras_of_the_image_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"EXTRAS=([a-z,]+)", TEXT)
    assert named == ["worker,cuda", "worker"]
    assert {extra for one in named for extra in one.split(",")} <= extras.keys()


def test_the_builder_passes_arguments_that_the_image_has() -> None:
    script = (ROOT / "deploy" / "build_image.sh").read_text()
    arguments = set(re.findall(r"^ARG (\w+)", TEXT, re.MULTILINE))
    assert set(re.findall(r"--build-arg (\w+)=", script)) == {"BASE", "EXTRAS"} <= arguments
    assert {f"FROM {base}" for base in re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)} == {
        "FROM ${BASE}",
        "FROM runtime",
    }


def test_without_a_builder_make_image_says_what_it_needs(tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    done = subprocess.run(
        ["bash", ROOT / "deploy" / "build_image.sh"], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "needs buildah" in done.stderr


def test_the_entrypoint_of_the_image_is_the_command() -> None:
    assert '\nENTRYPOINT ["decant"]\n' in TEXT


@needs_kustomize
def test_the_tiny_model_is_where_the_manifests_expect_it() -> None:
    assert "/opt/decant/models" in TEXT
    assert overlay("cpu-demo").settings("router").models == ("/opt/decant/models/tiny-python",)
    assert (ROOT / "models" / "tiny-python").is_dir()
