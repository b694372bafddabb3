"""Render every combination of components, and check each as the tests check those in which each two components meet.

    python -m tests.deploy.every_combination

kubectl alone takes some 0.3 s of a core for each, so the suite renders few. Prints what failed, and exits with 1 then.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product

from rich.console import Console
from rich.progress import track

from tests.deploy import test_custom_resources, test_manifests
from tests.deploy.rendering import CHOICES, combined

CHECKS = {
    name: check
    for name, check in vars(test_manifests).items()
    if name.startswith("test_") and list(inspect.signature(check).parameters) == ["manifests"]
}


@cache
def _check_custom(text: str) -> None:
    test_custom_resources.check(json.loads(text))


def failure(components: tuple[str, ...]) -> str:
    """Return what is wrong first with the manifests of a combination; empty: nothing."""
    checking = "rendering"
    try:
        manifests = combined.__wrapped__(components)
        for name, check in CHECKS.items():
            checking = name
            check(manifests)
        for one in filter(test_custom_resources.is_custom, manifests.objects):
            checking = one["kind"]
            _check_custom(json.dumps(one))
    except Exception as error:  # noqa: BLE001 - a check may raise anything
        return f"{'+'.join(components)}: {checking}: {type(error).__name__}: {str(error)[:500]}"
    return ""


def main() -> int:
    every = [tuple(name for name in chosen if name) for chosen in product(*CHOICES.values())]
    console, count = Console(stderr=True), 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(failure, every, chunksize=16)
        for found in track(results, f"{len(every):,} combinations", len(every), console=console):
            count += bool(found)
            if found:
                console.print(found, markup=False, highlight=False)
    console.print(f"{len(every):,} combinations, {len(CHECKS)} checks of each: {count} failed")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
