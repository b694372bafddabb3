"""A hook of mkdocs: links to files of the repository outside docs/ lead to pages of the site too.

    ../bench/README.md       ->  repository/bench/README.md           rendered
    ../protos/worker.proto   ->  repository/protos/worker.proto.md    its text as a code block
    examples/python/         ->  repository/docs/examples/python/     a list of its files

So do entries of the navigation. A link to a file that does not exist is left alone: mkdocs reports it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
MOUNT = "repository/"
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".js": "javascript", ".sh": "bash", ".proto": "protobuf", ".json": "json", ".txt": "text"}
SITE_TYPES = {".md", ".svg", ".png"}
NOT_SHOWN = re.compile(r"_pb2|_lock|-lock|^\.|^__")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    linked = {target for file in files.documentation_pages() for target in _targets(_repository_path(file.src_uri))}
    waiting = [*linked, *map(_repository_path, _pages(config.nav))]
    while waiting:
        target = waiting.pop()
        uri = _site_uri(target)
        if files.get_file_from_path(uri) is None and uri.startswith(MOUNT):
            page = File.generated(config, uri, content=_content(target), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(page)
            waiting.extend(_targets(target))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri

    def replace(match: re.Match[str]) -> str:
        target = _resolve(_repository_path(here), match[1])
        if target is None:
            return match[0]
        return posixpath.relpath(_site_uri(target), posixpath.dirname(here) or ".") + (match[2] or "")

    return "".join(part if is_code else LINK.sub(replace, part) for part, is_code in _parts(markdown))


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(entry)


def _targets(path: str) -> Iterator[str]:
    file = ROOT / path
    if file.is_dir():
        yield from (posixpath.join(path, name) for name in _names(file))
    if file.suffix != ".md":
        return
    for part, is_code in _parts(file.read_text()):
        if not is_code:
            for match in LINK.finditer(part):
                if target := _resolve(path, match[1]):
                    yield target


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    end = 0
    for match in CODE.finditer(text):
        yield text[end : match.start()], False
        yield match[0], True
        end = match.end()
    yield text[end:], False


def _resolve(page: str, link: str) -> str | None:
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if path.startswith("..") or not (ROOT / path).exists():
        return None
    for index in ("index.md", "README.md"):
        if (ROOT / path / index).exists():
            return posixpath.join(path, index)
    return path


def _repository_path(uri: str) -> str:
    return uri.removeprefix(MOUNT) if uri.startswith(MOUNT) else f"docs/{uri}"


def _site_uri(path: str) -> str:
    suffix = PurePosixPath(path).suffix
    is_page = path.startswith("docs/") and not path.startswith(("docs/examples", "docs/generate"))
    if is_page and suffix in SITE_TYPES:
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{MOUNT}{path}/index.md"
    return f"{MOUNT}{path}" if suffix in SITE_TYPES else f"{MOUNT}{path}.md"


def _names(folder: Path) -> list[str]:
    shown = [entry for entry in folder.iterdir() if entry.suffix in LANGUAGES and not NOT_SHOWN.search(entry.name)]
    return sorted(entry.name for entry in shown)


def _content(path: str) -> str | bytes:
    file = ROOT / path
    if file.is_dir():
        return f"# {path}\n\n" + "\n".join(f"- [{name}]({name})" for name in _names(file)) + "\n"
    if file.suffix in SITE_TYPES:
        return file.read_bytes() if file.suffix != ".md" else file.read_text()
    language = LANGUAGES.get(file.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n``````{language}\n{file.read_text().rstrip()}\n``````\n"
