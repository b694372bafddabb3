from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from decant import models


def small_with(folder: Path, name: str, **entries: Any) -> Path:
    shutil.copytree(models.path(), folder)
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder
