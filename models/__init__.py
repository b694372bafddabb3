"""The trained default model. Imports neither torch nor transformers."""

from pathlib import Path

DEFAULT_MODEL = "tiny-python"


def path() -> Path:
    return Path(__file__).resolve().parent / DEFAULT_MODEL
