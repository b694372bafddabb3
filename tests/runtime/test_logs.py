import asyncio
import errno
import json
import logging
import sys
import warnings
from io import StringIO
from typing import Any

import pytest

from decant.runtime.telemetry import logs
from decant.runtime.telemetry.logs import LogSettings


def lines(out: StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_is_json_with_time_level_event_and_service(out: StringIO) -> None:
    logs.start("router", LogSettings(), stream=out)
    logs.get("here").info("finished", tokens_out=3, seconds=0.5)
    logs.get("here").debug("too quiet")
    (line,) = lines(out)
    assert line.pop("time").endswith("Z")
    assert line == {
        "event": "finished",
        "level": "info",
        "service": "router",
        "module": "here",
        "tokens_out": 3,
        "seconds": 0.5,
    }


class Full(StringIO):
    """On a disk that is full at first."""

    is_full = True

    def flush(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("out")
def test_a_log_on_a_full_disk_fails_no_caller_and_goes_on_when_there_is_space() -> None:
    full = Full()
    logs.start("router", LogSettings(), stream=full)
    logs.get("here").info("lost, or written later")
    logging.getLogger("elsewhere").warning("lost, or written later")
    full.is_full = False
    logs.get("here").info("written again")
    assert lines(full)[-1]["event"] == "written again"
    full.close()
    logs.get("here").info("its reader has gone")


async def test_bound_fields_belong_to_their_task(out: StringIO) -> None:
    logs.start("router", LogSettings(), stream=out)
    log = logs.get("here")

    async def one(request_id: str) -> None:
        with logs.bound(request_id=request_id, attempt=1):
            for _ in range(5):
                log.info("step", expected=request_id)
                await asyncio.sleep(0)
            with logs.bound(attempt=2):
                await asyncio.create_task(inner(request_id))

    async def inner(request_id: str) -> None:
        log.info("inner", expected=request_id)

    await asyncio.gather(*(one(f"r{number}") for number in range(20)))
    log.info("outside")
    *bound, outside = lines(out)
    assert len(bound) == 120
    assert all(line["request_id"] == line["expected"] for line in bound)
    assert all(line["attempt"] == (2 if line["event"] == "inner" else 1) for line in bound)
    assert "request_id" not in outside


def test_log_records_of_the_standard_library_have_the_same_format(out: StringIO) -> None:
    logging.getLogger("huggingface_hub").addHandler(logging.StreamHandler(sys.stderr))
    logs.start("worker", LogSettings(), stream=out)
    with logs.bound(request_id="r1"):
        logging.getLogger("grpc._cython").warning("lost %s", "peer")
    logging.getLogger("grpc").debug("quiet")
    logging.getLogger("huggingface_hub.file_download").warning("slow hub")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("deprecated", stacklevel=1)
    first, second, third = lines(out)
    assert (first["event"], first["module"], first["level"]) == ("lost peer", "grpc._cython", "warning")
    assert (first["service"], first["request_id"]) == ("worker", "r1")
    assert second["event"] == "slow hub"
    assert not logging.getLogger("huggingface_hub").handlers
    assert "deprecated" in third["event"]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_neither_prompts_nor_local_variables_are_logged(out: StringIO, log_format: Any) -> None:
    logs.start("router", LogSettings(log_format=log_format), stream=out)
    secret_prompt = "what " + "I " * 3 + "wrote"
    try:
        dict[str, str]()["key"]
    except KeyError:
        logs.get("here").exception("oops", prompt=secret_prompt, messages=[secret_prompt], token_ids=None)
        logging.getLogger("other").exception("oops")
    text = out.getvalue()
    assert secret_prompt not in text
    assert f"<{len(secret_prompt)}>" in text
    assert text.count("KeyError: 'key'") == 2


def test_a_terminal_gets_columns_and_a_level_is_a_level(out: StringIO) -> None:
    logs.start("router", LogSettings(log_format="console", log_level="warning"), stream=out)
    logs.get("here").info("quiet")
    logs.get("here").warning("loud", request_id="r1")
    (line,) = out.getvalue().splitlines()
    assert "loud" in line
    with pytest.raises(json.JSONDecodeError):
        json.loads(line)


def test_values_that_json_cannot_encode_are_logged_as_text(out: StringIO) -> None:
    logs.start("router", LogSettings(), stream=out)
    logs.get("here").info("odd", value={1, 2}, text_of_bytes=b"\xff", surrogate="\ud800")
    (line,) = lines(out)
    assert line["value"] == "{1, 2}"
