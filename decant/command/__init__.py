"""The `decant` command. A command's modules are imported when it runs, so that importing this package is fast."""

import io
import os
import sys

_ROUTER = {"typer", "rich", "redis", "structlog", "pydantic", "tokenizers", "jinja2", "prometheus_client"}
_EXTRA_OF = dict.fromkeys(_ROUTER, "router") | dict.fromkeys(
    ["torch", "transformers", "safetensors", "numpy", "xxhash"], "all"
)


def main() -> None:
    _prepare_output()
    try:
        from decant.command.app import app

        app(prog_name="decant")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA_OF:
            raise
        sys.exit(f"decant: {missing} is not installed; pip install 'decant-llm[{_EXTRA_OF[missing]}]' brings it")


def _prepare_output() -> None:
    """Escape characters that the encoding of an output lacks, and discard what is written to a closed one."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # its descriptor is free, so this file gets it, and no connection does
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the life of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
