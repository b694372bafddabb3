from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from decant import Client, models
from tests.e2e import example_programs
from tests.e2e.browser import needs_chromium, served, text_of_page
from tests.e2e.checkpoints import THINK, name_last_tokens
from tests.e2e.deployment import Deployment, Process, deployment
from tests.e2e.envoy import envoy, needs_envoy
from tests.e2e.example_programs import EXAMPLES, printed, printed_by_fork
from tests.runtime.certificates import Certificates

pytestmark = pytest.mark.slow

TEMPLATE = """\
{#- calls: <tool_call> arguments #}
{%- if tools %}# {{ tools | tojson }}
{% endif %}
{%- for m in messages %}# {{ m.role }}: {{ m.content }}
{% endfor %}
{%- if add_generation_prompt %}class {% endif %}
{%- if add_generation_prompt and 'prime' in messages[0].content %}<think>{% endif %}{# </think> #}"""

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
    with deployment(routers=2, model=str(small), router=("--resume-grace-ms", "60000")) as made:
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


def run(example: str, folder: Path, variables: dict[str, str], *, forked: bool = False) -> str:
    file = EXAMPLES / "python" / example
    if forked:
        output = printed_by_fork(file, folder, variables)
    else:
        output = printed([sys.executable, str(file)], folder, variables)
    assert re.fullmatch(PRINTED[example], output, re.DOTALL), output
    return output


def test_every_example_is_run() -> None:
    assert sorted(path.name for path in (EXAMPLES / "python").iterdir() if path.suffix) == sorted(PRINTED)


@pytest.mark.parametrize("example", sorted(PRINTED.keys() - {"tls.py"}))
def test_an_example_in_python(example: str, running: Deployment, tmp_path: Path) -> None:
    """In forks, as each interpreter would import decant again. The next two tests run programs as a user does."""
    run(example, tmp_path, {"DECANT_ADDRESS": ",".join(running.addresses)}, forked=True)


def test_a_resumed_answer_reads_as_a_whole_one(running: Deployment, tmp_path: Path) -> None:
    routers = {"DECANT_ADDRESS": ",".join(running.addresses)}
    whole, resumed = (run(example, tmp_path, routers) for example in ("generate.py", "resume_stream.py"))
    *text, last = resumed.splitlines()
    *whole_text, count = whole.splitlines()
    assert text == whole_text
    assert last.split()[-1] == count.split()[1], "tokens"


def test_an_example_over_tls(over_tls: dict[str, str], tmp_path: Path) -> None:
    run("tls.py", tmp_path, over_tls)


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


ENDS = {
    "go": ("InvalidArgument", ["the stream ended: Canceled"]),
    "java": ("INVALID_ARGUMENT", ["the stream ended: CANCELLED"]),
    "javascript": ("InvalidArgument", ["the stream ended: Canceled"]),
    "ruby": ("GRPC::InvalidArgument", []),
}
"""In each language, the name of the status of the refused request, and the lines after it."""


@pytest.fixture(scope="module")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example_programs.javascript(tmp_path_factory.mktemp("javascript"))


def check_output(output: str, language: str, address: str) -> None:
    code, ends = ENDS[language]
    lines = output.removesuffix("\n").split("\n")
    refused = len(lines) - len(ends) - 1
    check_answer(lines[:refused], address)
    assert lines[refused:] == [f"{code} INVALID_FIELD: sampling.temperature, 0 to 100", *ends]


def test_every_language_has_a_test() -> None:
    assert sorted(path.name for path in EXAMPLES.iterdir()) == sorted([*ENDS, "python"])


def test_the_example_in_node(javascript: Path, running: Deployment) -> None:
    output = printed(["node", "node.js"], javascript, {"DECANT_ADDRESS": running.address})
    check_output(output, "javascript", running.address)


@pytest.mark.parametrize("language", ["go", "java", "ruby"])
def test_the_example_in_another_language(language: str, running: Deployment, tmp_path: Path) -> None:
    command, folder = example_programs.BUILDS[language](tmp_path)
    output = printed(command, folder, {"DECANT_ADDRESS": running.address})
    check_output(output, language, running.address)


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not on PATH")
def test_the_commands_of_grpcurl(running: Deployment, tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "reference" / "clients.md").read_text()
    block = re.search(r"```\n(grpcurl .+?)```", page, re.DOTALL)
    assert block is not None
    commands = block[1].replace("\\\n", " ").replace("127.0.0.1:50051", running.address).splitlines()
    services, request, answer, health = (printed(["sh", "-c", command], tmp_path, {}) for command in commands)
    assert {"decant.v1.InferenceService", "grpc.health.v1.Health"} <= set(services.split())
    assert "string prompt = 3;" in request
    with Client(running.address) as client:
        text = client.generate("def add(a, b):\n", max_tokens=24, temperature=0).text
    deltas = re.findall(r'"text":\s+(".*")', answer)
    assert "".join(json.loads(delta) for delta in deltas) == text
    assert re.search(r'"completion_?[Tt]okens":\s+24', answer)
    assert json.loads(health) == {"status": "SERVING"}


@needs_chromium
@needs_envoy
def test_the_example_in_a_browser(javascript: Path, running: Deployment) -> None:
    with envoy(running.addresses) as proxy, served(javascript) as pages:
        output = text_of_page(f"http://{pages}/page.html?envoy=http://{proxy}", "answered")
    check_output(output, "javascript", running.address)
