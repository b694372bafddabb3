"""The trained default model, and the script that trains it. Imports neither torch nor transformers."""

from pathlib import Path

DEFAULT_MODEL = "tiny-python"


def path() -> Path:
    return Path(__file__).resolve().parent / DEFAULT_MODEL
