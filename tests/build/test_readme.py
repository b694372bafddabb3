"""What the pages show runs as it stands there; the README's example needs a deployment, see tests/e2e."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["docs/engine.md"])
def test_the_examples_of_a_page_run(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert "def read_lines(path):" in done.stdout
        assert len(done.stdout.splitlines()) > 2, "nothing was written after the prompt"


def test_every_page_that_is_linked_exists() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "node_modules" not in page.parts]
    for page in [ROOT / "README.md", *pages]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links {target}"
