"""Chat templates of a model by name: routers use ``default``, and ``tool_use`` for conversations with tools.

    chat_template.jinja                                       the default
    additional_chat_templates/NAME.jinja, chat_templates/...  one each
    tokenizer_config.json, chat_template.json                 "chat_template": a text, or texts by name

If several files name the same template, the one that comes first here counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decant.runtime.model_files import ModelFiles, ModelUnreadable, read_json

DEFAULT = "default"
FOR_TOOLS = "tool_use"
_FOLDERS = ("chat_templates", "additional_chat_templates")


def read_templates(files: ModelFiles, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Read the templates, given tokenizer_config.json. Raises ModelUnreadable."""
    of_processor = read_json(files.id, files.folder / "chat_template.json") or {}
    templates: dict[str, str] = {}
    for name, described in (("chat_template.json", of_processor), ("tokenizer_config.json", config)):
        templates |= _named(files.id, name, described.get("chat_template"))
    for folder in _FOLDERS:
        for file in sorted((files.folder / folder).glob("*.jinja")):
            templates[file.stem] = _read(files.id, file)
    file = files.folder / "chat_template.jinja"
    if file.is_file():
        templates[DEFAULT] = _read(files.id, file)
    return {name: template for name, template in templates.items() if template}


def _named(model: str, file: str, described: Any) -> Mapping[str, str]:
    match described:
        case None:
            return {}
        case str():
            return {DEFAULT: described}
        case dict():
            pairs = list(described.items())
        case [*entries] if all(isinstance(entry, dict) for entry in entries):
            pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
        case _:
            pairs = [(None, None)]
    if not all(isinstance(name, str) and isinstance(template, str) for name, template in pairs):
        raise ModelUnreadable(model, f"{file}: chat_template is neither a text nor texts by name")
    return dict(pairs)


def _read(model: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelUnreadable(model, f"{file.name} can't be read: {error}") from None
