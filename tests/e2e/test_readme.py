import re
import subprocess
import sys
from pathlib import Path

import pytest

from decant import Client
from tests.e2e.deployment import PATIENCE_S, Deployment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_program_of_the_readme(pair: Deployment) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "127.0.0.1:50051" in program
    program = program.replace("127.0.0.1:50051", pair.address)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    text, _, usage = done.stdout.partition("Usage(")
    with Client(pair.address) as client:
        answer = client.generate("def read_lines(path):\n", max_tokens=60, temperature=0.7, seed=1)
    assert text == answer.text
    assert f"completion_tokens={answer.usage.completion_tokens}," in usage
