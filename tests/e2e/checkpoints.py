"""Copies of the small model with one change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from decant import models


def small_with(folder: Path, name: str, **entries: Any) -> Path:
    """A copy of it in ``folder``, which must not be there yet, with these entries in its JSON file of that name."""
    shutil.copytree(models.path(), folder)
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder
