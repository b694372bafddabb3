"""The trained default model, and the script that trains it. Imports neither torch nor transformers."""

from pathlib import Path

DEFAULT_MODEL = "tiny-python"

PROMPT = 'def is_empty(self):\n    """Return True if the queue is empty."""\n'
TEMPERATURE, SEED = 0.7, 2
"""Give a complete function for ``PROMPT`` with each build of the kernels."""


def path() -> Path:
    return Path(__file__).resolve().parent / DEFAULT_MODEL
