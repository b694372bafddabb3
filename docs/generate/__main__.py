"""Write the generated pages of docs/reference: python -m docs.generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate import api, cli, errors, metrics, settings

REFERENCE = Path(__file__).parents[1] / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "api.md": api.render,
    "cli.md": cli.render,
    "errors.md": errors.render,
    "metrics.md": metrics.render,
    "settings.md": settings.render,
}


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for name, render in PAGES.items():
        (REFERENCE / name).write_text(render())


if __name__ == "__main__":
    main()
