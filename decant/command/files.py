from __future__ import annotations

from pathlib import Path

from decant.command.errors import CommandFailed


def check_report(file: Path | None) -> None:
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise CommandFailed(f"--html: a file in a folder that exists, got {file}", status=2)


def write_report(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"--html: {file}: {error.strerror}") from None
