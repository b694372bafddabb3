"""Programs of docs/examples in other languages than Python, built where their language is installed.

Each function builds a program in an empty folder and returns the command that runs it and the folder to run it in. It
skips the test where something is missing, before it does anything that takes time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.e2e.deployment import PATIENCE_S
from tests.e2e.fork_server import completed

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
DEBIAN_GO = Path("/usr/share/gocode")
DEBIAN_JARS = Path("/usr/share/java")
OFFLINE = {"ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH", "ERR_SOCKET_TIMEOUT"}
"""Errors of npm without its registry."""

Program = tuple[list[str], Path]


TRIES = 10

TOO_LATE = re.compile("RESOURCE_?EXHAUSTED.*is expected after", re.IGNORECASE | re.DOTALL)
"""Refusal of a router that expects the answer after the deadline of an example, as one on a busy machine does."""


def printed(command: list[str], folder: Path, variables: Mapping[str, str]) -> str:
    """Run a command that must succeed, with this checkout on PYTHONPATH; return its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    return _output(run)


def printed_by_fork(file: Path, folder: Path, variables: Mapping[str, str]) -> str:
    """Run a program in Python that must succeed, in a fork that has imported decant; return its standard output."""
    arguments = (str(file), str(folder))
    return _output(lambda: completed("tests.e2e.program", *arguments, timeout=PATIENCE_S, environ=variables))


def _output(run: Callable[[], subprocess.CompletedProcess[str]]) -> str:
    for _ in range(TRIES):
        done = run()
        if not done.returncode or not TOO_LATE.search(done.stderr):
            break
    assert done.returncode == 0, f"{done.args}: {done.stdout}\n{done.stderr}"
    return done.stdout


def _require(packages: str, *commands: str, files: tuple[Path, ...] = ()) -> None:
    missing = [command for command in commands if not shutil.which(command)]
    missing += [str(file) for file in files if not file.exists()]
    if missing:
        pytest.skip(f"needs {packages}: no {', '.join(missing)}")


def _copied(language: str, folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(EXAMPLES / language / name, folder)
    return folder


def javascript(folder: Path) -> Path:
    """Install and generate the example for Node.js and browsers; return its folder."""
    _require("Node.js 20 or newer, with npm", "node", "npm")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=PATIENCE_S).stdout
    if int(version.strip().lstrip("v").partition(".")[0]) < 20:
        pytest.skip(f"needs Node.js 20 or newer, not {version.strip()}")
    _copied("javascript", folder, "package.json", "package-lock.json", "generate.sh", "ask.js", "node.js", "page.html")
    command = ["npm", "ci", "--prefer-offline", "--no-audit", "--no-fund", "--fetch-retries=0", "--fetch-timeout=60000"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    if OFFLINE & set(re.findall(r"\w+", installed.stderr)):
        pytest.skip("the npm registry can't be reached")
    assert installed.returncode == 0, installed.stderr
    printed(["npm", "run", "generate", "--", str(ROOT)], folder, {"PYTHON": sys.executable})
    return folder


def go(folder: Path) -> Program:
    """Without modules, from Debian's sources: they need no network."""
    _require(
        "Go, protoc with its plugins, and Debian's packages of gRPC for Go",
        *("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
        files=tuple(DEBIAN_GO / "src/google.golang.org" / name for name in ("grpc", "genproto", "protobuf")),
    )
    package = _copied("go", folder / "src" / "decant.example" / "ask", "generate.sh", "go.mod", "ask.go")
    printed(["./generate.sh", str(ROOT)], package, {})
    printed(["go", "build", "-o", "ask", "."], package, {"GO111MODULE": "off", "GOPATH": f"{folder}:{DEBIAN_GO}"})
    return ["./ask"], package


def java(folder: Path) -> Program:
    _require(
        "a JDK, protoc with its plugin, and Debian's packages of gRPC for Java",
        *("javac", "java", "protoc", "grpc_java_plugin"),
        files=tuple(
            DEBIAN_JARS / f"{name}.jar" for name in ("grpc-stub", "netty-codec-http2", "perfmark-api", "protobuf")
        ),
    )
    _copied("java", folder, "generate.sh", "Ask.java")
    printed(["./generate.sh", str(ROOT)], folder, {})
    sources = [str(file) for file in folder.rglob("*.java")]
    classes = f"{DEBIAN_JARS}/*"
    quick = "-J-XX:TieredStopAtLevel=1"  # the compiler ends before it is worth to optimize it
    printed(["javac", quick, "-nowarn", "-d", "classes", "-cp", classes, *sources], folder, {})
    return ["java", "-XX:TieredStopAtLevel=1", "-cp", f"classes:{classes}", "Ask"], folder


def ruby(folder: Path) -> Program:
    _require("Ruby with its packages grpc and grpc-tools", "ruby", "grpc_tools_ruby_protoc")
    _copied("ruby", folder, "generate.sh", "ask.rb")
    printed(["./generate.sh", str(ROOT)], folder, {})
    return ["ruby", "ask.rb"], folder


BUILDS: Mapping[str, Callable[[Path], Program]] = {"go": go, "java": java, "ruby": ruby}
