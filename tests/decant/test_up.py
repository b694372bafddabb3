from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from openai import OpenAI

from decant import Client
from decant.protos.worker_pb2 import AuditRequest
from decant.protos.worker_pb2_grpc import AdminStub
from decant.runtime.connections import certificates
from tests.decant.supervisor_harness import Up, nothing_left, up
from tests.e2e.fork_server import completed

pytestmark = pytest.mark.slow

PATIENCE_S = 600.0
DECANT = [sys.executable, "-m", "decant.command"]
UP = [*DECANT, "up", "--port", "0", "--kv-memory", "32M", "--dtype", "float32"]
ROOT = Path(__file__).parents[2]


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`decant` in a fork, as each interpreter would import it again; two tests start one."""
    environ = {"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}
    return completed("decant.command", *arguments, timeout=PATIENCE_S, environ=environ)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("up")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Up]:
    with up(folder, [*UP, "--openai", "0", "--gateway", "0"]) as running:
        running.until("up", "ready")
        descendants = running.descendants()
        yield running
        descendants += running.descendants()
        assert running.end() == 0
        nothing_left(descendants, folder)


def deployment(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("decant-up-*.json")
    announced: dict[str, Any] = json.loads(file.read_text())
    return announced


def test_generate_finds_the_deployment(running: Up, folder: Path) -> None:
    arguments = ["generate", "def add(a, b):\n", "--max-tokens", "8", "--temperature", "0", "--json"]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}
    done = subprocess.run(
        [*DECANT, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["receipt"]["prefill_worker"], answer["receipt"]["decode_worker"]) == ("prefill-1", "decode-1")
    with Client(running.until("up", "ready")["address"]) as client:
        same = client.generate("def add(a, b):\n", max_tokens=8, temperature=0)
        assert (same.text, same.usage.completion_tokens) == (answer["text"], answer["usage"]["completion_tokens"])
        assert [model.id for model in client.models()] == ["tiny-python"]


@pytest.mark.parametrize("name", ["openai", "gateway"])
def test_openais_client_gets_answers_also_from_a_gateway_that_was_restarted(running: Up, name: str) -> None:
    url = running.until("up", "ready")[f"{name}_url"]
    with OpenAI(base_url=url, api_key="unused", timeout=PATIENCE_S) as client:
        request: Any = {"model": "tiny-python", "prompt": "def add(a, b):\n", "max_tokens": 8, "temperature": 0}
        text = client.completions.create(**request).choices[0].text
        running.child(int(url.removesuffix("/v1").rpartition(":")[2])).kill()
        running.until(name, "readiness", 2, state="ready")
        assert client.completions.create(**request).choices[0].text == text


def test_a_refusal_is_one_line(running: Up, folder: Path) -> None:
    done = command(folder, "generate", "x", "--top-p", "2")
    assert done.returncode == 1
    assert "top_p" in done.stderr
    assert done.stderr.count("\n") == 1


def test_all_processes_are_ready_and_every_block_is_accounted_for(running: Up, folder: Path) -> None:
    report = json.loads(command(folder, "status", "--json").stdout)
    assert [one["peer"]["id"] for one in report["routers"]] == ["router-1"]
    assert {one["peer"]["id"] for one in report["workers"]} == {"prefill-1", "decode-1"}
    assert command(folder, "audit").returncode == 0
    assert command(folder, "audit", "--redis-url", deployment(folder)["redis_url"]).returncode == 0


def test_top_shows_both_pools_and_what_the_run_moved(running: Up, folder: Path) -> None:
    generated = command(folder, "generate", "def f(x):\n", "--max-tokens", "4", "--json")
    assert generated.returncode == 0, generated.stderr
    done = command(folder, "top", "--once", "--json", "--interval", "0.1")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    processes = {one["name"]: one for one in shown["processes"]}
    assert {name: one["role"] for name, one in processes.items()} == {
        "prefill-1": "prefill",
        "decode-1": "decode",
        "router-1": "router",
        "openai": "",
        "gateway": "",
    }
    assert {one["state"] for one in processes.values()} == {"ready"}
    assert processes["prefill-1"]["figures"]["prefill_tokens_total"] > 0
    assert processes["router-1"]["figures"]["is_store_available"]
    (model,) = shown["models"]
    assert model["requests_total"] >= 1
    assert model["output_tokens_total"] >= json.loads(generated.stdout)["usage"]["completion_tokens"]


def test_top_ends_at_an_interrupt_without_a_stack(running: Up, folder: Path) -> None:
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}
    top = ["env", "--default-signal=INT", *DECANT, "top", "--interval", "0.1"]  # it is ignored in background jobs
    with subprocess.Popen(
        top, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as showing:
        assert showing.stdout is not None
        assert "decant top" in showing.stdout.readline()
        showing.send_signal(signal.SIGINT)
        _, errors = showing.communicate(timeout=PATIENCE_S)
    assert (showing.returncode, errors) == (130, "")


def test_workers_of_the_run_leave_service_and_change_pools_and_come_back(running: Up, folder: Path) -> None:
    done = command(folder, "drain", "decode-1")
    assert done.returncode == 0, done.stderr
    for arguments in (("drain", "--undo", "decode-1"), ("move", "decode-1", "--role", "prefill")):
        assert command(folder, *arguments).returncode == 0
    running.until("decode-1", "role changed", role="prefill")
    done = command(folder, "move", "decode-1", "--role", "decode")
    assert done.stdout == "decode-1 is in the pool of decode now, it was one of prefill\n"


def test_a_caller_without_the_credentials_of_the_run_gets_nothing_from_a_worker(running: Up, folder: Path) -> None:
    for name in ("prefill-1", "decode-1"):
        assert running.until(name, "serving")["tls"] == "mutual"
        with grpc.insecure_channel(running.until(name, "serving")["address"]) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                AdminStub(channel).Audit(AuditRequest(), timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    strange = certificates.make(folder / "strange")
    files = ("--ca", str(strange.ca), "--certificate", str(strange.certificate), "--key", str(strange.key))
    done = command(folder, "audit", *files)
    shutil.rmtree(folder / "strange")
    assert done.returncode == 1


def test_a_question_waits_for_workers_that_are_killed_and_come_back(running: Up, folder: Path) -> None:
    for name in ("prefill-1", "decode-1"):
        port = int(running.until(name, "serving")["address"].rpartition(":")[2])
        running.child(port).kill()
    done = command(folder, "generate", "def f():\n", "--max-tokens", "4", "--wait", str(PATIENCE_S))
    # The router waits for the workers, or the command does (tests/decant/test_waiting.py has its messages).
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert re.search(r" \| [1-4] tokens \| ", done.stderr)


def test_a_model_that_is_not_there_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with up(tmp_path, [*UP, "--model", str(tmp_path / "nowhere")]) as running:
        assert running.ended() == 2
        assert running.lines == []
        assert running.stderr() == f"decant: --model: no such folder: {tmp_path}/nowhere\n"
        nothing_left([], tmp_path)


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with up(tmp_path, [*UP, "--port", str(port)]) as running:
            assert running.ended() == 2
            assert running.lines == []
            assert f"--port: {port} is in use by process {os.getpid()} " in running.stderr()
            nothing_left([], tmp_path)
