"""The real tritonclient, in an environment of its own, against a router: the table in docs/guides/gateways.md."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from decant import Client
from tests.build.environments import UV, make_environment, run, succeed
from tests.e2e.deployment import PATIENCE_S, Deployment

pytestmark = pytest.mark.slow

TRITON = "tritonclient[grpc]==2.73.0"
PROGRAM = Path(__file__).with_name("triton_program.py")
PROMPT = "def total(values):\n    result = 0\n"
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "gateways.md"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton")
    python = make_environment(folder / "env")
    installed = run(UV, "pip", "install", "--quiet", "--python", python, TRITON, cwd=folder)
    if installed.returncode != 0:
        pytest.skip(f"needs a package index with {TRITON}")
    return python


def test_tritonclient_gets_the_text_whole_and_streamed_and_errors_by_name(
    pair: Deployment, python: Path, tmp_path: Path
) -> None:
    program = shutil.copy(PROGRAM, tmp_path)
    with Client(pair.address) as own:
        model = own.models()[0].id
        text = own.generate(PROMPT, max_tokens=24, temperature=0, timeout=PATIENCE_S).text
    found = json.loads(succeed(python, program, pair.address, model, PROMPT, cwd=tmp_path))
    assert found["ready"] == [True, True, True]
    assert found["server"] == "decant"
    assert found["inputs"] == ["text_input", "stream", "sampling_parameters", "exclude_input_in_output"]
    assert found["whole"] == [text]
    assert "".join(found["pieces"]) == text
    assert len(found["pieces"]) > 10, "pieces arrive as they are generated"
    message = "sampling_parameters.top_p: above 0, to 1, got 2.0"
    assert found["error"] == ["StatusCode.INVALID_ARGUMENT", message]
    assert found["stream error"].endswith(message)
    assert found["other method"] == "StatusCode.UNIMPLEMENTED"


def test_the_program_of_the_page_prints_an_answer(pair: Deployment, python: Path, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(import json, numpy, tritonclient.+?)```", PAGE.read_text(), re.DOTALL)
    assert "localhost:50051" in program
    (tmp_path / "program.py").write_text(program.replace("localhost:50051", pair.address))
    printed = succeed(python, tmp_path / "program.py", cwd=tmp_path)
    assert printed.startswith("def add(a, b):")
    assert len(printed.splitlines()) > 1
