from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Argument: TypeAlias = str | bytes | int

_FOLDER = Path(__file__).parent / "lua"
_COMMON = (_FOLDER / "common.lua").read_text()


@dataclass(frozen=True)
class Script:
    name: str
    text: str = field(repr=False)
    sha: str = field(repr=False)

    def call(self, keys: list[str], *args: Argument) -> Command:
        return Command(("EVALSHA", self.sha, len(keys), *keys, *args), self, keys=(3, 3 + len(keys)))


@dataclass(frozen=True)
class Command:
    args: tuple[Argument, ...]
    script: Script | None = None
    keys: tuple[int, int] = (0, 0)
    """Where ``args`` has names of keys: from the first of them to the end."""

    def with_prefix(self, prefix: str) -> tuple[Argument, ...]:
        """Arguments with a prefix before each key."""
        if not prefix:
            return self.args
        first, end = self.keys
        return (*self.args[:first], *(f"{prefix}{key!s}" for key in self.args[first:end]), *self.args[end:])


def on_key(name: str, key: str, *args: Argument) -> Command:
    return Command((name, key, *args), keys=(1, 2))


def script(name: str, text: str) -> Script:
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def load(name: str) -> Script:
    return script(name, _COMMON + (_FOLDER / f"{name}.lua").read_text())


REQUEST_ACCEPT = load("request_accept")
REQUEST_WRITE = load("request_write")
REQUEST_READ = load("request_read")
REQUEST_ADOPT = load("request_adopt")
REQUEST_DISCARD = load("request_discard")
RESULTS_ADD = load("results_add")
RESULTS_OLDEST = load("results_oldest")
RESULTS_REMOVE = load("results_remove")
OPEN_ADD = load("open_add")
OPEN_TAKE = load("open_take")
OPEN_ORPHANED = load("open_orphaned")
DIRECTORY_REGISTER = load("directory_register")
DIRECTORY_RENEW = load("directory_renew")
DIRECTORY_REMOVE = load("directory_remove")
DIRECTORY_LIST = load("directory_list")
DIRECTORY_IS_REGISTERED = load("directory_is_registered")
STORE_INSTANCE = load("store_instance")
QUOTA_ACQUIRE = load("quota_acquire")
QUOTA_RELEASE = load("quota_release")
QUOTA_RENEW = load("quota_renew")
