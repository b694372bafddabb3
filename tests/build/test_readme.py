import re
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", ["docs/internals/engine.md"])
def test_the_examples_of_a_page_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {"__name__": "__main__"})
        printed = capsys.readouterr().out
        assert "def read_lines(path):" in printed
        assert len(printed.splitlines()) > 2, "nothing was generated after the prompt"


HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SOURCES = [str(path) for package in ROOT.glob("*/__init__.py") for path in package.parent.rglob("*.*")]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy" / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if "node_modules" not in page.parts),
]


def anchors(page: Path) -> set[str]:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in HEADING.findall(prose)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_commands_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for target, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^)]+))?\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), f"{target}#{anchor}"
    for file in re.findall(r"`([\w/]+\.(?:py|proto|lua))`", text):
        assert any(source.endswith(f"/{file}") for source in SOURCES), file


EXAMPLE = re.compile(r"\[(examples/[^\]]+)\]\((?:\.\./|docs/)*\1\):\n\n```(?:python|javascript)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize(("path", "block"), [found for page in PAGES for found in EXAMPLE.findall(page.read_text())])
def test_shown_code_is_that_of_the_examples(path: str, block: str) -> None:
    text = (DOCS / path).read_text()
    assert any(textwrap.indent(block, " " * depth) in text for depth in (0, 2, 4, 8)), f"{path} lacks:\n{block}"
