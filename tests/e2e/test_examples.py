from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from decant import Client, models
from tests.e2e.checkpoints import THINK, name_last_tokens
from tests.e2e.deployment import PATIENCE_S, Deployment, Process, deployment
from tests.runtime.certificates import Certificates

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
TEMPLATE = """\
{#- calls: <tool_call> arguments #}
{%- if tools %}# {{ tools | tojson }}
{% endif %}
{%- for m in messages %}# {{ m.role }}: {{ m.content }}
{% endfor %}
{%- if add_generation_prompt %}class {% endif %}
{%- if add_generation_prompt and 'prime' in messages[0].content %}<think>{% endif %}{# </think> #}"""

OFFLINE = {"ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH", "ERR_SOCKET_TIMEOUT"}

PRINTED = {
    "again.py": r"the same text: True from the same seed: True\nREQUEST_ID_REUSED\n",
    "cancel_generation.py": r"(cancelled\n)+the stream ended: CANCELLED\ncancelled unknown_request\n",
    "conversation.py": r".+\nprompt tokens \d+\n",
    "embeddings.py": r"\d+ values each\nthe other function: 0\.\d{3}, the imports: -?0\.\d{3}\n",
    "errors.py": r"sampling.temperature: 0 to 100, got -1.0\nNOT_FOUND MODEL_NOT_FOUND no-such-model\ntoo late: .+",
    "generate.py": r".+\n(length|stop) \d+ tokens in \d+ ms\n",
    "generate_stream.py": r".+\nFinished\(.+\) Usage\(.+\)\nagain with seed \d+ on small\n",
    "get_generation.py": r"\w+ with \d+ tokens\nsucceeded with 200 tokens, kept until .+\n\S+ queued\n.+ succeeded\n",
    "guided.py": r"dict_keys\(\['language', 'version', 'tested'\]\) complete: True\n\d{1,2}\.\d{1,2} (yes|no)\n"
    r"guided.json_schema: keywords that are supported, got uniqueItems at #\n",
    "logprobs.py": r"('.+' -\d+\.\d\d, rank 1, of .+\n){5}",
    "many_at_once.py": r"'import .+\n'def main.+\n'for key, .+\n",
    "models_served.py": r"small at \w+ with 4096 tokens\nprompt and output together: 2048\n.+ temperature \S+\n",
    "reasoning.py": r".+\n40 tokens of reasoning in \d+\nNo: it is 7 times.*\n",
    "resume_stream.py": r".+\nleft after \d+ tokens, read to the end after \d+\n",
    "scores.py": r"(-\d+\.\d\d ' . == .': ('.+' -\d+\.\d\d ?)+\n){3}prompt tokens, of the prompt once: \d+\n"
    r"continuations\[0\]\.text: a text after which the prompt has the same tokens .+\n",
    "several_outputs.py": r"[012] .+\noutput 2 ends by (length|stop): .+\nthe likeliest of six: .+\n",
    "server_info.py": r"router \S+ of version .+ serves small .+\nat most 20 alternatives .+\nnot implemented: .+\n",
    "tls.py": r"over TLS: \S+\n",
    "tools.py": r"call weather \{'city': '(Bern|Zürich)'\}\n.*\n",
    "tokens.py": r"7 tokens: \['def', .+\]\ndef add\(a, b\):\n",
}
"""The whole standard output of each."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    shutil.copytree(models.path(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    name_last_tokens(folder, *THINK)
    return folder


@pytest.fixture(scope="module")
def running(small: Path) -> Iterator[Deployment]:
    with deployment(routers=2, model=str(small)) as made:
        yield made


@pytest.fixture
def over_tls(running: Deployment, small: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    made = Certificates(tmp_path)
    proof = ("--tls-certificate", str(made.certificate), "--tls-key", str(made.key), "--tls-client-ca", str(made.ca))
    store = ("--port", "0", "--redis-url", running.redis.url, "--models", str(small))
    with Process("router", *store, *proof) as router:
        router.until("readiness", state="ready")
        yield {
            "DECANT_ADDRESS": router.until("serving")["address"],
            "DECANT_CA": str(made.ca),
            "DECANT_CERTIFICATE": str(made.certificate),
            "DECANT_KEY": str(made.key),
        }


def printed(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def run(example: str, folder: Path, variables: dict[str, str]) -> str:
    output = printed([sys.executable, str(EXAMPLES / "python" / example)], folder, variables)
    assert re.fullmatch(PRINTED[example], output, re.DOTALL), output
    return output


def test_every_example_is_run() -> None:
    assert sorted(path.name for path in (EXAMPLES / "python").iterdir() if path.suffix) == sorted(PRINTED)


@pytest.mark.parametrize("example", sorted(PRINTED.keys() - {"tls.py"}))
def test_an_example_in_python(example: str, running: Deployment, tmp_path: Path) -> None:
    run(example, tmp_path, {"DECANT_ADDRESS": ",".join(running.addresses)})


def test_a_resumed_answer_reads_as_a_whole_one(running: Deployment, tmp_path: Path) -> None:
    routers = {"DECANT_ADDRESS": ",".join(running.addresses)}
    whole, resumed = (run(example, tmp_path, routers) for example in ("generate.py", "resume_stream.py"))
    *text, last = resumed.splitlines()
    *whole_text, count = whole.splitlines()
    assert text == whole_text
    assert last.split()[-1] == count.split()[1], "tokens"


def test_an_example_over_tls(over_tls: dict[str, str], tmp_path: Path) -> None:
    run("tls.py", tmp_path, over_tls)


def node_is_there() -> bool:
    if not shutil.which("node") or not shutil.which("npm"):
        return False
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=PATIENCE_S).stdout
    return int(version.strip().lstrip("v").partition(".")[0]) >= 20


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not node_is_there():
        pytest.skip("needs Node.js 20 or newer, with npm")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "generate.sh", "ask.js"):
        shutil.copy(EXAMPLES / "node" / name, folder)
    command = ["npm", "ci", "--fetch-retries=0", "--fetch-timeout=60000"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    if OFFLINE & set(re.findall(r"\w+", installed.stderr)):
        pytest.skip("the npm registry can't be reached")
    assert installed.returncode == 0, installed.stderr
    printed(["npm", "run", "generate", "--", str(ROOT)], folder, {"PYTHON": sys.executable})
    return folder


@pytest.fixture(scope="module")
def ruby(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ruby")
    for name in ("generate.sh", "ask.rb"):
        shutil.copy(EXAMPLES / "ruby" / name, folder)
    if not shutil.which("ruby") or not shutil.which("grpc_tools_ruby_protoc"):
        pytest.skip("needs Ruby with its packages grpc and grpc-tools")
    printed(["./generate.sh", str(ROOT)], folder, {})
    return folder


def check_answer(lines: list[str], address: str) -> None:
    """Check the lines of an answer and those of a resumed one, as the examples in each language print them."""
    *text, finished, resumed = lines
    with Client(address) as client:
        answer = client.generate("def read_lines(path):\n", max_tokens=40, temperature=0)
    assert "\n".join(text) == answer.text
    assert answer.finished is not None
    count = answer.usage.completion_tokens
    assert re.fullmatch(rf"(FINISH_REASON_)?{answer.finished.reason.name}: {count} tokens in \d+ ms", finished)
    begin, whole = resumed.split(": ", 1)
    assert re.fullmatch(rf"lost after 1\d tokens, resumed to {count}", begin)
    assert json.loads(whole) == answer.text


def test_the_example_in_node(node: Path, running: Deployment) -> None:
    output = printed(["npm", "start", "--silent"], node, {"DECANT_ADDRESS": running.address})
    *lines, refused, cancelled = output.removesuffix("\n").split("\n")
    check_answer(lines, running.address)
    assert refused == "InvalidArgument INVALID_FIELD: sampling.temperature, 0 to 100"
    assert cancelled == "the stream ended: Canceled"


def test_the_example_in_ruby(ruby: Path, running: Deployment) -> None:
    output = printed(["ruby", "ask.rb"], ruby, {"DECANT_ADDRESS": running.address})
    *lines, refused = output.removesuffix("\n").split("\n")
    check_answer(lines, running.address)
    assert refused == "GRPC::InvalidArgument INVALID_FIELD: sampling.temperature, 0 to 100"
