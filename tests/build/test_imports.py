import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FREE = {"models"}  # a folder of data and its trainer

LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def test_every_package_has_a_layer() -> None:
    packages = {init.parent.name for init in (ROOT / "decant").glob("*/__init__.py")} - FREE
    layers = next(contract["layers"] for contract in LINTER["contracts"] if contract["id"] == "layers")
    named = {name.strip() for layer in layers for name in layer.split("|")}
    assert {f"decant.{name}" for name in packages} == named - {"bench"}


def test_every_linked_folder_is_a_package_of_the_repository() -> None:
    links = [path for path in (ROOT / "decant").iterdir() if path.is_symlink()]
    assert links
    for link in links:
        assert link.readlink() == Path("..") / link.name
        assert (ROOT / link.name / "__init__.py").exists()
