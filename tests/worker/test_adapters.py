from __future__ import annotations

import pytest

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
