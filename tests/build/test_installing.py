import importlib.util
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
assert _spec is not None
assert _spec.loader is not None
install = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(install)

LISTING = """:env:.find-links='/wheels'
:env:.default-timeout='180'
global.extra-index-url='https://one.example/simple https://two.example/simple'
global.find-links='/elsewhere'
"""


def test_settings_of_pip_are_read_and_the_environment_wins() -> None:
    assert install.pip_settings(LISTING) == {
        "extra-index-url": ["https://one.example/simple", "https://two.example/simple"],
        "find-links": ["/wheels"],
    }


def test_settings_of_pip_become_options_of_uv() -> None:
    assert install.uv_options(install.pip_settings(LISTING)) == [
        *("--index", "https://one.example/simple", "--index", "https://two.example/simple"),
        *("--find-links", "/wheels"),
        *("--index-strategy", "unsafe-best-match"),
    ]
    assert install.uv_options({}) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other platforms have one build of torch")
@pytest.mark.parametrize(("installer", "index"), [("uv", "--default-index"), ("pip", "--index-url")])
def test_torch_comes_from_what_is_configured_then_by_driver(
    monkeypatch: pytest.MonkeyPatch, installer: str, index: str
) -> None:
    monkeypatch.setattr(install, "has_nvidia_driver", lambda: False)
    assert install.torch_source(installer, {}, {}) != []
    assert install.torch_source(installer, {"find-links": ["/wheels"]}, {}) == []
    assert install.torch_source(installer, {}, {"UV_TORCH_BACKEND": "cu130"}) == []
    assert install.torch_source(installer, {}, {"TORCH_INDEX": "https://x.example"}) == [index, "https://x.example"]
    monkeypatch.setattr(install, "has_nvidia_driver", lambda: True)
    assert install.torch_source(installer, {}, {}) == []


@pytest.mark.parametrize(("installer", "index"), [("uv", "--index"), ("pip", "--index-url")])
def test_an_index_for_torch_goes_with_an_index_of_pip(installer: str, index: str) -> None:
    """uv refuses a second ``--default-index``."""
    settings = {"index-url": ["https://m.example"]}
    assert install.torch_source(installer, settings, {"TORCH_INDEX": "https://x.example"}) == [
        index,
        "https://x.example",
    ]


def installed() -> dict[str, str]:
    return {one.name: one.version for one in distributions()}


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_an_environment_that_has_the_locked_versions_is_left_as_it_is(installer: str) -> None:
    before = installed()
    command = [sys.executable, str(ROOT / "install.py"), "--with", installer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert installed() == before
