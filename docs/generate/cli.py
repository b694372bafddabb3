from __future__ import annotations

from collections.abc import Iterator

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from decant.command.app import app
from docs.generate.markdown import code, head, page, sentence, table

INTRO = """\
`decant COMMAND --help` shows the same. Commands that call a deployment find the one that `decant up` started on this
machine, unless an option names another one. They end with 0, with 1 if they failed, and with 2 if the command line is
wrong. An option that is on is turned off by `--no-NAME`. A secret for a router with tenants comes from the variable
`DECANT_TOKEN`."""
PROCESSES = """\
These run one process each, in the foreground, until SIGTERM or Ctrl-C. Their options are [settings](settings.md)."""


def render() -> str:
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    commands = dict(_commands(root))
    processes = {name: command for name, command in commands.items() if _takes_settings(command)}
    parts = [head("Command line", "the command's options"), INTRO]
    for name, command in commands.items():
        if name not in processes:
            parts += _section(name, command)
    rows = [(code(f"decant {name}"), _help(command)) for name, command in processes.items()]
    return page([*parts, "## Processes", PROCESSES, table(("command", ""), rows)])


def _commands(group: TyperGroup, prefix: str = "") -> Iterator[tuple[str, TyperCommand | TyperGroup]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield f"{prefix}{name}", command
            yield from _commands(command, f"{prefix}{name} ")
        elif isinstance(command, TyperCommand):
            yield f"{prefix}{name}", command


def _takes_settings(command: TyperCommand | TyperGroup) -> bool:
    return bool(command.context_settings.get("ignore_unknown_options"))


def _section(name: str, command: TyperCommand | TyperGroup) -> list[str]:
    context = typer.Context(command, info_name=f"decant {name}")
    usage = command.get_usage(context).removeprefix("Usage: ")
    rows = [_row(parameter) for parameter in command.params if isinstance(parameter, TyperArgument | TyperOption)]
    parts = [f"## decant {name}", f"```\n{' '.join(usage.split())}\n```", _help(command)]
    return [*parts, table(("option", "default", ""), rows)] if rows else parts


def _help(command: TyperCommand | TyperGroup) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n"))


def _row(parameter: TyperArgument | TyperOption) -> tuple[str, str, str]:
    is_option = isinstance(parameter, TyperOption)
    names = parameter.opts if is_option else [(parameter.name or "").upper()]
    return ", ".join(map(code, names)), _default(parameter), sentence(parameter.help or "")


def _default(parameter: TyperArgument | TyperOption) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in (None, "") or callable(value):
        return ""
    return code(f"{value:g}" if isinstance(value, float) else value)
