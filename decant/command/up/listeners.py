from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_LISTENING = "0A"
_LONGEST = 40  # characters of a command


def listener(port: int) -> str | None:
    """Describe the listener of a port: "process 4242 (redis-server *:6379)"; None if none is visible in /proc."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _inodes(_PROC / "net" / table, port)}
    for process in _PROC.glob("[0-9]*"):
        try:
            if any(os.readlink(file) in inodes for file in (process / "fd").iterdir()):
                return f"process {process.name} ({_command(process)})"
        except OSError:  # another user's, or ended meanwhile
            continue
    return None


def _command(process: Path) -> str:
    program, *arguments = (process / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    text = " ".join([Path(program).name, *arguments])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _inodes(table: Path, port: int) -> list[str]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port]
