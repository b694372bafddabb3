"""The `decant` command. A command's modules are imported when it runs, so that importing this package is fast."""

import sys

_ROUTER = {"typer", "rich", "redis", "structlog", "pydantic", "tokenizers", "jinja2", "prometheus_client"}
_EXTRA_OF = dict.fromkeys(_ROUTER, "router") | dict.fromkeys(
    ["torch", "transformers", "safetensors", "numpy", "xxhash"], "all"
)


def main() -> None:
    try:
        from decant.command.app import app

        app(prog_name="decant")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA_OF:
            raise
        sys.exit(f"decant: {missing} is not installed; pip install 'decant-llm[{_EXTRA_OF[missing]}]' brings it")
