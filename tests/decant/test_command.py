from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

import decant
from decant.client.retry import MORE_TRIES, RetryState
from decant.command.app import app
from decant.command.deployment.deployments import Deployment, DeploymentRecord
from decant.command.errors import CommandFailed
from decant.protos import inference_pb2 as pb
from decant.state.errors import PrivateRedisFailed
from decant.state.private_redis import PrivateRedis
from tests.decant.scripted import PATIENCE_S, Break, Script, endless_answer, refuse, short_answer
from tests.decant.test_client import calling_answer

KEYS = {
    "request_id",
    "model",
    "seed",
    "text",
    "reasoning",
    "tool_calls",
    "token_ids",
    "logprobs",
    "finish_reason",
    "stop",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "usage",
    "receipt",
    "resumed_at",
}


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, arguments, **options)


def test_the_answer_and_then_one_line_about_it(address: str) -> None:
    done = run("generate", "x", "--address", address)
    assert done.exit_code == 0
    assert done.stdout == "abc\n"
    (line,) = done.stderr.splitlines()
    assert "3 tokens" in line
    assert "p -> d" in line
    assert "ttft" in line
    assert "tpot" in line


def test_json_has_stable_keys(address: str) -> None:
    done = run("generate", "x", "--address", address, "--json")
    answer = json.loads(done.stdout)
    assert answer.keys() == KEYS
    assert (answer["text"], answer["finish_reason"], answer["stop"]) == ("abc", "stop", 2)
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["receipt"]["decode_worker"] == "d"
    assert answer["receipt"]["handoff_ms"] is None
    assert answer["ttft_ms"] > 0


def test_options_are_sent_and_what_is_not_given_is_not(address: str, script: Script) -> None:
    run("generate", "x", "--address", address, "--temperature", "0", "--seed", "1", "--max-tokens", "5")
    run("generate", "x", "--address", address, "--stop", "a", "--stop", "b", "--stop-token-id", "7", "--logprobs", "0")
    run(
        "generate",
        "x",
        "--address",
        address,
        "--chat",
        "--request-id",
        "r",
        "--no-ignore-eos",
        "--parse-special-tokens",
    )
    assert all(request.request_id for request in script.requests)
    for request in script.requests[:2]:
        request.ClearField("request_id")
    assert script.requests == [
        pb.GenerateRequest(
            prompt="x",
            sampling=pb.SamplingParams(temperature=0, seed=1),
            stopping=pb.StoppingParams(max_tokens=5),
        ),
        pb.GenerateRequest(
            prompt="x",
            stopping=pb.StoppingParams(stop=["a", "b"], stop_token_ids=[7]),
            response=pb.ResponseOptions(logprobs=0),
        ),
        pb.GenerateRequest(
            messages=pb.Messages(messages=[pb.Message(role="user", content="x")]),
            request_id="r",
            stopping=pb.StoppingParams(ignore_eos=False),
            parse_special_tokens=True,
        ),
    ]


@pytest.mark.parametrize("prompt", [["-"], []])
def test_the_prompt_may_come_from_standard_input(address: str, script: Script, prompt: list[str]) -> None:
    run("generate", *prompt, "--address", address, input="def f():\n")
    assert script.requests[0].prompt == "def f():\n"


def test_a_refusal_is_one_line_with_field_limit_and_value(address: str, script: Script) -> None:
    script.refusal = decant.InvalidArgument("sampling.top_p", "above 0, to 1", 2.0)
    done = run("generate", "x", "--address", address, "--top-p", "2")
    assert done.exit_code == 1
    assert done.stderr == "decant: sampling.top_p: above 0, to 1, got 2.0\n"
    assert done.stdout == ""


def test_a_value_that_no_field_holds_is_one_line(address: str) -> None:
    done = run("generate", "x", "--address", address, "--max-tokens", "-1")
    assert done.exit_code == 1
    assert done.stderr.startswith("decant: max_tokens: ")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Failed tries of a command, which ends after a number of them and not by the clock."""
    failures: list[str] = []
    pause_after = RetryState.pause_after

    def record(state: RetryState, error: decant.ServiceError, **options: Any) -> float:
        failures.append(str(error))
        return pause_after(state, error, **options)

    monkeypatch.setattr(RetryState, "pause_after", record)
    monkeypatch.setattr("decant.command.generate.RESUME_SECONDS", 0.0)
    return failures


def test_a_server_that_is_not_there_is_named_once_while_it_is_tried_again(
    failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decant.command.deployment.deployments.running", list)  # other tests start some
    done = run("generate", "x", "--address", "127.0.0.1:1")
    assert done.exit_code == 1
    waiting, error = done.stderr.splitlines()
    assert waiting == f"{error.removeprefix('decant: ')}; trying again"
    assert "no connection to 127.0.0.1:1" in error
    assert len(failures) == 1 + MORE_TRIES


@pytest.mark.usefixtures("failures")
def test_an_address_of_a_deployment_that_starts_is_said_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = Deployment(7, (), "unix:///r", has_started=False)
    monkeypatch.setattr("decant.command.deployment.deployments.running", lambda: [starting])
    done = run("generate", "x", "--address", "127.0.0.1:1")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[0].endswith("; `decant up` (process 7) is starting; trying again")
    assert "is starting" not in run("generate", "x", "--address", "invalid.example:1").stderr


@pytest.mark.parametrize(("wait", "seconds"), [([], 30.0), (["--wait", "90"], 90.0), (["--wait", "1"], 30.0)])
def test_generate_waits_for_a_router_at_its_address_as_long_as_it_is_asked_to(
    wait: list[str], seconds: float, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []

    class Recorded(decant.Client):
        def __init__(self, *arguments: Any, resume_seconds: float, **options: Any) -> None:
            made.append(resume_seconds)
            super().__init__(*arguments, resume_seconds=resume_seconds, **options)

    monkeypatch.setattr("decant.command.generate.Client", Recorded)
    assert run("generate", "x", "--address", address, *wait).stdout == "abc\n"
    assert made == [seconds]


def test_without_a_folder_for_temporary_files_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for command in (["generate", "x"], ["status"], ["bench"]):
        done = run(*command)
        assert done.exit_code == 1
        assert done.stderr == "decant: TMPDIR: a folder that can be written, got none, nor can /tmp be written\n"
    with pytest.raises(CommandFailed, match="TMPDIR: a folder"), DeploymentRecord():
        pass
    with pytest.raises(PrivateRedisFailed, match="TMPDIR: a folder"):
        PrivateRedis().start()


@pytest.mark.slow
@pytest.mark.parametrize("redirect", ["", ">&-", "2>&- >&-", "| head -c 1", ">/dev/full"])
def test_an_output_that_is_ascii_or_closed_gets_no_traceback(redirect: str, address: str, script: Script) -> None:
    async def foreign(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        async for message in short_answer(request, context):
            if message.HasField("delta"):
                message.delta.text = message.delta.text.replace("a", "é\u2028")
            yield message

    script.answering = foreign
    command = f"{sys.executable} -m decant.command generate é --address {address} {redirect}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "Traceback" not in done.stderr
    if redirect == ">/dev/full":
        assert (done.returncode, done.stderr) == (1, "decant: standard output: No space left on device\n")
        return
    assert done.returncode == 0
    if not redirect:
        assert done.stdout == "\\xe9\\u2028bc\n"


def test_an_error_in_mid_answer_comes_after_what_was_written(address: str, script: Script) -> None:
    async def breaking(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        async for message in endless_answer(request, context):
            yield message
            if message.seq == 2:
                await refuse(context, decant.Internal())

    script.answering = breaking
    done = run("generate", "x", "--address", address)
    assert done.exit_code == 1
    assert done.stdout == "ab"
    assert done.stderr.startswith("decant: ")


def test_a_stream_that_breaks_is_resumed_and_it_says_where(address: str, script: Script) -> None:
    break_ = Break(2, grpc.StatusCode.UNAVAILABLE)
    script.breaks.append(break_)
    done = run("generate", "x", "--address", f"127.0.0.1:1,{address}")
    assert (done.exit_code, done.stdout) == (0, "abc\n")
    resumed, account = done.stderr.splitlines()
    assert resumed == f"resumed at {address}"
    assert "3 tokens" in account
    script.breaks.append(break_)
    answer = json.loads(run("generate", "x", "--address", address, "--json").stdout)
    assert (answer["text"], answer["resumed_at"]) == ("abc", [address])


def test_tools_of_a_file_are_sent_and_calls_are_shown(address: str, script: Script, tmp_path: Path) -> None:
    script.answering = calling_answer
    file = tmp_path / "tools.json"
    file.write_text('[{"name": "now"}]')
    done = run("generate", "x", "--address", address, "--tools", str(file))
    assert done.stdout == 'abc\nnow({"a": 1})\nnow({})\n'
    (request,) = script.requests
    assert request.messages == pb.Messages(messages=[pb.Message(role="user", content="x")], tools=[pb.Tool(name="now")])
    shown = json.loads(run("generate", "x", "--address", address, "--tools", str(file), "--json").stdout)
    assert shown["tool_calls"][0] == {"id": "c0", "name": "now", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), ("{", "is not JSON"), ("{}", "a list of tools")]
)
def test_a_file_without_tools_is_refused_in_one_line(
    address: str, tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "tools.json"
    if content is not None:
        file.write_text(content)
    done = run("generate", "x", "--address", address, "--tools", str(file))
    assert done.exit_code == 2
    assert str(file) in done.stderr
    assert message in done.stderr


def test_an_invalid_address_is_refused_in_one_line() -> None:
    done = run("generate", "x", "--address", ",")
    assert done.exit_code == 2
    assert done.stderr.startswith("decant: --address: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", "x"], ["status"], ["audit"]])
def test_without_a_deployment_it_says_what_to_do(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = run(*command)
    assert done.exit_code == 1
    assert "decant up" in done.stderr


def test_ctrl_c_cancels_the_request_and_ends_with_130(address: str, script: Script) -> None:
    script.answering = endless_answer
    command = [sys.executable, "-m", "decant.command", "generate", "x", "--address", address, "--request-id", "r"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.read(2) == b"ab"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    assert script.cancelled == ["r"]


def test_installed_plain_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('No module named typer', name='typer')\n")
    done = subprocess.run(
        [sys.executable, "-m", "decant.command", "up"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert done.stderr == "decant: typer is not installed; pip install 'decant-llm[router]' brings it\n"


def test_every_command_explains_itself() -> None:
    for name in ("generate", "status", "audit", "drain", "move", "scale-advice", "up", "demo"):
        done = run(name, "--help")
        assert done.exit_code == 0
        assert name in done.stdout


def test_the_token_of_the_caller_comes_from_the_environment(script: Script, address: str) -> None:
    for token, brought in (("s3cret", ["Bearer s3cret"]), ("", [])):
        done = run("generate", "x", "--address", address, env={"DECANT_TOKEN": token})
        assert done.exit_code == 0
        assert script.authorized[-1][1] == brought
    done = run("generate", "x", "--address", address, env={"DECANT_TOKEN": "two words"})
    assert done.exit_code == 2
    assert "DECANT_TOKEN: printable ASCII" in done.stderr
    assert "two words" not in done.stderr
