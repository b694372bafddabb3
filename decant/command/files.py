from __future__ import annotations

from pathlib import Path

from decant.command.errors import CommandFailed


def write_report(file: Path, text: str) -> None:
    """Raises CommandFailed."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"--html: {file}: {error.strerror}") from None
