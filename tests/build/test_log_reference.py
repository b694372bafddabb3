from __future__ import annotations

import pytest

from docs.generate.logs import PARTS, ROOT, Event, UnknownEvent, events, events_of


def test_events_are_read_from_the_calls_with_their_fields() -> None:
    source = '_log.info("a", one=1, **more)\n_log.exception("b", exc_info=error)\nother.info("c")\n'
    assert list(events_of(source)) == [Event("a", "info", ("one", "...")), Event("b", "error", ())]


def test_an_event_in_a_variable_is_found_by_its_assignments() -> None:
    source = 'text = "a" if first else "b"\n_log.warning(text)\n'
    assert [one.name for one in events_of(source)] == ["a", "b"]
    with pytest.raises(UnknownEvent):
        list(events_of("_log.warning(make())\n"))


def test_each_module_that_logs_is_in_the_reference() -> None:
    listed = [ROOT / folder for folders in PARTS.values() for folder in folders]
    packages = {path.parent for path in ROOT.glob("*/__init__.py")} - {ROOT / "tests", ROOT / "bench", ROOT / "decant"}
    sources = [path for package in (*packages, ROOT / "decant" / "command") for path in package.rglob("*.py")]
    logging = [path for path in sources if "_log = logs.get(" in path.read_text()]
    assert logging
    assert [path for path in logging if not any(path.is_relative_to(folder) for folder in listed)] == []


def test_no_part_of_the_reference_is_empty() -> None:
    for folders in PARTS.values():
        assert events(folders)
