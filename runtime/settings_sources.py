"""Reader of settings: refuses an unknown name in any source, and errors name the source, unlike pydantic-settings.

flags  >  environment (DECANT_...)  >  file (TOML, --config or DECANT_CONFIG)  >  defaults of the class
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from decant.runtime.error_details import Violation, shorten
from decant.runtime.settings import PREFIX, InvalidSettings, SettingError, Settings, flag_name, is_list, variable_name

CONFIG = "config"
CLIENT_VARIABLES = frozenset({"DECANT_TOKEN"})
"""Variables of the `decant` command, allowed for any process."""

_KUBERNETES_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP))?")

_S = TypeVar("_S", bound=Settings)


def load(
    kind: type[_S],
    arguments: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    program: str = "decant",
    ignore: Collection[str] = (),
) -> _S:
    """Read the settings; ``--help`` ends the process. Raises InvalidSettings.

    `ignore` names variables of other programs.
    """
    flags = _flags(kind, arguments, program)
    variables = _variables(kind, os.environ if environ is None else environ, ignore)
    path = flags.pop(CONFIG, None) or variables.pop(CONFIG, None)
    file = _file(kind, Path(path)) if path else {}
    origins = {name: f"{path}: {name}" for name in file}
    origins |= {name: variable_name(name) for name in variables}
    origins |= {name: flag_name(name) for name in flags}
    try:
        return kind.model_validate({**file, **variables, **flags})
    except ValidationError as error:
        raise InvalidSettings([_violation(kind, origins, detail) for detail in error.errors()]) from None


def load_or_exit(kind: type[_S], arguments: Sequence[str], *, program: str = "decant") -> _S:
    try:
        return load(kind, arguments, program=program)
    except InvalidSettings as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidSettings([Violation("command line", message, "")])


def _flags(kind: type[Settings], arguments: Sequence[str], program: str) -> dict[str, Any]:
    parser = _Parser(prog=program, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument(flag_name(CONFIG), metavar="FILE", help=f"a TOML file of settings [{variable_name(CONFIG)}]")
    for name, field in kind.model_fields.items():
        text = _help(name, field).replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag_name(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(flag_name(name), dest=name, metavar=_metavar(field), help=text)
    values, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        names = [flag_name(name) for name in (*kind.model_fields, CONFIG)]
        raise InvalidSettings([_unknown(argument.partition("=")[0], names, "setting") for argument in unknown])
    return vars(values)


def _variables(kind: type[Settings], environ: Mapping[str, str], ignore: Collection[str]) -> dict[str, Any]:
    names = {variable_name(name): name for name in (*kind.model_fields, CONFIG)}
    others = CLIENT_VARIABLES.union(ignore)
    unknown = [name for name in environ if name.startswith(PREFIX) and name not in names and name not in others]
    if unknown:
        raise InvalidSettings([_unknown(name, names, _variable_kind(name)) for name in sorted(unknown)])
    return {names[name]: value for name, value in environ.items() if name in names}


def _variable_kind(name: str) -> str:
    if _KUBERNETES_LINK.search(name):
        return "variable (Kubernetes adds such ones unless the pod says enableServiceLinks: false)"
    return "variable"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises InvalidSettings."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidSettings([Violation(str(path), f"a readable TOML file: {error}", "")]) from None


def _file(kind: type[Settings], path: Path) -> dict[str, Any]:
    content = read_toml(path)
    unknown = [name for name in content if name not in kind.model_fields]
    if unknown:
        raise InvalidSettings([_unknown(f"{path}: {name}", kind.model_fields, "key") for name in unknown])
    return content


def _unknown(name: str, names: Iterable[str], what: str) -> Violation:
    near = difflib.get_close_matches(name.rpartition(" ")[2], list(names), n=1)
    return Violation(name, f"no such {what}" + (f"; did you mean {near[0]}?" if near else ""), "")


def _violation(kind: type[Settings], origins: Mapping[str, str], detail: ErrorDetails) -> Violation:
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SettingError):
        return Violation(origins.get(cause.field, cause.field), cause.limit, shorten(cause.value))
    name = str(detail["loc"][0]) if detail["loc"] else ""
    limit = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    field = kind.model_fields.get(name)
    if detail["type"] == "missing":
        return Violation(f"{flag_name(name)} or {variable_name(name)}", "is needed", "")
    secret = field is not None and SecretStr in (field.annotation, *get_args(field.annotation))
    return Violation(origins.get(name, name), limit, "(secret)" if secret else shorten(detail["input"]))


def _help(name: str, field: FieldInfo) -> str:
    default = "" if field.is_required() or field.default is None else f"; default {_text(field.default)}"
    return f"{field.description or ''}{default} [{variable_name(name)}]"


def _text(default: object) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _metavar(field: FieldInfo) -> str:
    options = [field.annotation, *get_args(field.annotation)]
    for option in options:
        if get_origin(option) is Literal:
            return "|".join(map(str, get_args(option)))
    if is_list(field):
        return "A,B"
    named = next((option for option in options if isinstance(option, type) and option is not type(None)), str)
    return {int: "N", float: "X", Path: "PATH"}.get(named, "TEXT")
