"""A model's tokenizer files as one zip archive, from which a gateway makes the same tokenizer."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "config.json",
    "generation_config.json",
)
TEMPLATES = ("*.jinja", "chat_template.json")
CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class TokenizerArchive:
    content: bytes
    sha256: str

    @classmethod
    def of(cls, folder: Path) -> TokenizerArchive:
        """Read the files of a folder, which takes a thread's time; equal files give equal bytes."""
        files = [folder / name for name in NAMES]
        files += sorted(path for pattern in TEMPLATES for path in folder.glob(pattern))
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in files:
                if file.is_file():
                    archive.writestr(zipfile.ZipInfo(file.name), file.read_bytes(), zipfile.ZIP_DEFLATED)
        content = out.getvalue()
        return cls(content, hashlib.sha256(content).hexdigest())

    def chunks(self) -> list[bytes]:
        return [self.content[start : start + CHUNK_BYTES] for start in range(0, len(self.content), CHUNK_BYTES)]
