"""import-linter checks what the contracts name; this checks that they name every package."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_OURS = {"tests", "docs", "deploy", "build", "dist"}
FREE = {"bench", "models"}  # may import anything; that nothing imports them is in the layers

LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def packages() -> set[str]:
    found = {init.parent.name for init in ROOT.glob("*/__init__.py")}
    return {name for name in found - NOT_OURS if not name.startswith(".")}


def contracts(kind: str) -> list[dict[str, list[str]]]:
    return [contract for contract in LINTER["contracts"] if contract["type"] == kind]


def test_every_package_is_read_by_the_linter() -> None:
    assert set(LINTER["root_packages"]) == packages(), "[tool.importlinter] root_packages"


def test_every_package_has_a_floor() -> None:
    (layers,) = contracts("layers")
    drawn = {name.strip(" ()") for layer in layers["layers"] for name in layer.replace("|", ":").split(":")}
    assert not packages() - drawn, "the layers of [tool.importlinter] lack them"


def test_every_package_has_a_contract_of_its_own() -> None:
    sources = {source for contract in contracts("forbidden") for source in contract["source_modules"]}
    missing = packages() - FREE - {source.partition(".")[0] for source in sources}
    assert not missing, "no [[tool.importlinter.contracts]] of type forbidden names them as a source"


def test_every_package_is_distributed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    missing = packages() - set(setuptools["packages"]["find"]["include"])
    assert not missing, "[tool.setuptools.packages.find] include"
