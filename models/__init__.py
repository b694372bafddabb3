"""The trained model that travels with the project, and the script that makes it (``decant.models.train``).

Importing this package needs neither torch nor transformers: it only says where the files are.
"""

from pathlib import Path

DEFAULT_MODEL = "tiny-python"


def path() -> Path:
    """Folder of the default model, ready for ``from_pretrained`` (weights, tokenizer, card)."""
    return Path(__file__).resolve().parent / DEFAULT_MODEL
