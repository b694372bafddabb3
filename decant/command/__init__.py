"""The `decant` command. A command's modules are imported when it runs, so that importing this package is fast."""

import errno
import io
import os
import sys

_ROUTER = {"typer", "rich", "redis", "structlog", "pydantic", "tokenizers", "jinja2", "prometheus_client"}
_EXTRA_OF = dict.fromkeys(_ROUTER, "router") | dict.fromkeys(
    ["torch", "transformers", "safetensors", "numpy", "xxhash"], "all"
)
_EXTRA_OF |= dict.fromkeys(["starlette", "uvicorn", "httptools"], "gateway")


_UNWRITABLE = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors of a write to standard output: its reader has gone, or its disk is full or broken."""


def main() -> None:
    _prepare_output()
    try:
        from decant.command.app import app

        try:
            app(prog_name="decant")
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _discard_output()
        sys.exit(1 if error.errno == errno.EPIPE else f"decant: standard output: {error.strerror}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA_OF:
            raise
        sys.exit(f"decant: {missing} is not installed; pip install 'decant-llm[{_EXTRA_OF[missing]}]' brings it")


def _discard_output() -> None:
    """Let what is still to be written go nowhere: Python writes it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _prepare_output() -> None:
    """Escape characters that the encoding of an output lacks, and discard what is written to a closed one."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # its descriptor is free, so this file gets it, and no connection does
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the life of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
