"""The trained default model and its training script (``decant.models.train``).

Importing this package needs neither torch nor transformers: it only has the path of the files.
"""

from pathlib import Path

DEFAULT_MODEL = "tiny-python"


def path() -> Path:
    """Folder of the default model, ready for ``from_pretrained`` (weights, tokenizer, card)."""
    return Path(__file__).resolve().parent / DEFAULT_MODEL
