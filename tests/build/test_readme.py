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


HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SOURCES = [str(path) for package in ROOT.glob("*/__init__.py") for path in package.parent.rglob("*.*")]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "node_modules" not in page.parts),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    headings = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in HEADING.findall(text)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings
    for file in re.findall(r"`([\w/]+\.(?:py|proto|lua))`", text):
        assert any(source.endswith(f"/{file}") for source in SOURCES), file
