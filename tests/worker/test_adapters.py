from __future__ import annotations

from pathlib import Path

import pytest

from decant.engine.errors import AdapterRefused
from decant.engine.fake import ADAPTER, FakeAdapters
from decant.runtime.settings import SettingError
from decant.worker import adapters


@pytest.mark.parametrize(
    "entry", ["pirate", "pirate=", "=/x", "../pirate=/x", "a/b=/x", "a b=/x", ".hidden=/x", "é=/x", f"{'a' * 129}=/x"]
)
def test_an_entry_that_names_no_adapter_is_refused_by_name(entry: str) -> None:
    with pytest.raises(SettingError, match=r"adapters: NAME=FOLDER, a name of up to 128 letters, .*, got "):
        adapters.parse([entry])


def test_two_adapters_of_one_name_are_refused() -> None:
    with pytest.raises(SettingError, match="adapters: each name once, got pirate"):
        adapters.parse(["pirate=/x", "poet=/y", "pirate=/z"])


def test_adapters_are_announced_with_the_digest_that_requests_name(tmp_path: Path) -> None:
    loaded = FakeAdapters()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ADAPTER).write_text(name)
    served = adapters.load(loaded, [f"pirate={tmp_path / 'one'}", f"v1.2_a-b={tmp_path / 'two'}"])
    assert [adapter.name for adapter in served] == ["pirate", "v1.2_a-b"]
    assert len({adapter.digest for adapter in served}) == 2
    assert all(adapter.digest in loaded and adapter.rank and adapter.memory_bytes for adapter in served)


def test_an_adapter_that_can_not_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=f"adapter pirate is not served: {tmp_path} has no file"):
        adapters.load(FakeAdapters(), [f"pirate={tmp_path}"])
