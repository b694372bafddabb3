"""Write the generated pages of docs/, and the alerts as Kubernetes takes them: python -m docs.generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate import api, cli, errors, logs, metrics, ports, prometheus_rule, protocol, settings

DOCS = Path(__file__).parents[1]
RULES = "../deploy/components/monitoring/rules.yaml"
PAGES: Mapping[str, Callable[[], str]] = {
    "internals/protocol.md": protocol.render,
    "reference/api.md": api.render,
    "reference/cli.md": cli.render,
    "reference/errors.md": errors.render,
    "reference/logs.md": logs.render,
    "reference/metrics.md": metrics.render,
    "reference/ports.md": ports.render,
    "reference/settings.md": settings.render,
    RULES: prometheus_rule.render,
}


def main() -> None:
    for name, render in PAGES.items():
        (DOCS / name).write_text(render())


if __name__ == "__main__":
    main()
