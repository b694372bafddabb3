from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from decant.runtime.settings_sources import load
from tests.deploy.rendering import PROCESSES, ROOT, needs_kustomize, overlay, pod

TEXT = (ROOT / "deploy" / "Containerfile").read_text()
SCRIPT = (ROOT / "deploy" / "build_image.sh").read_text()


def test_every_package_is_in_the_image() -> None:
    assert not (ROOT / ".containerignore").exists(), "Docker reads .dockerignore alone"
    packages = {init.parent.name for init in ROOT.glob("*/__init__.py")} - {"tests", "bench"}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for package in packages:
        assert f"\nCOPY {package} {package}\n" in TEXT
        assert f"!{package}" in ignored


@needs_kustomize
def test_the_user_of_the_image_is_the_one_that_pods_run_as() -> None:
    stages = [re.findall(r"^USER (\d+):\d+$", stage, re.MULTILINE) for stage in TEXT.split("\nFROM ")]
    users = {int(named[-1]) for named in stages if named}
    processes = overlay("cpu-demo").processes.values()
    assert {pod(one)["securityContext"]["runAsUser"] for one in processes} == users


def test_each_kind_of_image_is_an_extra_and_has_a_name() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    kinds = set(re.findall(r"^ +(\w+)\) ", TEXT, re.MULTILINE))
    assert kinds == {"router", "worker", "cuda"} <= extras.keys()
    for kind in kinds:
        assert re.search(rf"\b{kind}\b.*\) echo ", SCRIPT)


def test_the_builder_passes_arguments_and_stages_that_the_image_has() -> None:
    arguments = set(re.findall(r"^ARG (\w+)", TEXT, re.MULTILINE))
    assert set(re.findall(r"--build-arg (\w+)=", SCRIPT)) == {"BASE", "EXTRAS", "KIND"} <= arguments
    assert set(re.findall(r"stage=(\w+)", SCRIPT)) <= set(re.findall(r"^FROM \S+ AS (\w+)$", TEXT, re.MULTILINE))
    assert set(re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)) == {"${BASE}", "runtime"}


def test_every_package_and_the_base_are_pinned() -> None:
    assert re.search(r"^ARG BASE=\S+:\d+\.\d+\.\d+-", TEXT, re.MULTILINE)
    lock = (ROOT / "requirements.lock").read_text()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in build:
        assert f"\n{re.split('[>=]', requirement)[0]}==" in lock
    assert "PIP_CONSTRAINT=/src/requirements.lock PIP_BUILD_CONSTRAINT=/src/requirements.lock" in TEXT


@pytest.fixture
def admin_port() -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/alive" else 503)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def check_health(*path: str, **variables: str) -> tuple[int, str]:
    command = [sys.executable, "-I", "-S", str(ROOT / "deploy" / "health_check.py"), *path]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30)
    return done.returncode, (done.stdout + done.stderr).strip()


def test_the_health_check_asks_the_admin_port(admin_port: int) -> None:
    own = {"DECANT_ADMIN_PORT": str(admin_port)}
    assert check_health(**own) == (0, "/alive: 200 OK")
    assert check_health(**own, DECANT_HOST="0.0.0.0") == (0, "/alive: 200 OK")
    assert check_health("/ready", **own) == (1, "/ready: 503 Service Unavailable")
    assert check_health(**own, DECANT_ADMIN_HOST="127.0.0.2")[0] == 1
    assert check_health(DECANT_ADMIN_PORT="x")[0] == 1
    assert check_health() == (0, "no health check: DECANT_ADMIN_PORT is not set")
    assert "/usr/local/lib/decant/health_check.py" in TEXT
    assert "!deploy/health_check.py" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_processes_of_the_demo_have_settings_that_they_accept() -> None:
    code = "from image_demo import *; print(json.dumps([vars(p) for p in processes(PORTS, 'latest', Chroot.settings)]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "deploy", capture_output=True, text=True, check=True, timeout=60
    )
    redis, *others = json.loads(done.stdout)
    assert redis["name"] == "redis"
    ports = set[int]()
    for one in others:
        settings: Any = load(PROCESSES[one["name"]], one["command"][2:], one["environment"])
        ports |= {settings.port, settings.admin_port}
        assert settings.redis_url == "redis://127.0.0.1:6379"
    assert len(ports) == 6


def test_the_demo_removes_a_container_that_was_made_and_did_not_start(tmp_path: Path) -> None:
    podman = tmp_path / "podman"
    podman.write_text(
        f"""#!/bin/bash
echo "$*" >> {tmp_path}/calls
while [ "$1" != --cidfile ] && [ $# -gt 0 ]; do shift; done
case "$2" in */redis) [ -e "$2" ] || {{ echo made > "$2"; exit 125; }} ;; */router) exit 125 ;; esac
"""
    )
    podman.chmod(0o755)
    code = """
from image_demo import *
for name in ("redis", "router"):
    try:
        with ExitStack() as stack:
            Podman(stack, "image").start(Process(name, "image", ("decant",), {}))
    except DemoFailed:
        print("failed")
"""
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "deploy", env=own, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("failed\n" * 2, "")
    removals = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("rm ")]
    assert [line.rpartition("/")[2] for line in removals] == ["redis", "router"]
    assert not any("decant-demo-router" in line.split() for line in removals), "another program's container stays"


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
