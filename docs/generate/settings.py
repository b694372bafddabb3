from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic.fields import FieldInfo

from decant.decode_worker.main import DecodeSettings
from decant.gateway.settings import GatewaySettings
from decant.prefill_worker.main import PrefillSettings
from decant.router.settings import RouterSettings
from docs.generate.markdown import code, head, page, sentence, table

INTRO = """\
Each process reads its settings once, when it starts: from its command line, from the environment, from a TOML file, and
from the defaults, in this order. The setting `queue_limit` is the flag `--queue-limit`, the variable
`DECANT_QUEUE_LIMIT` and the key `queue_limit` of the file that `--config` (`DECANT_CONFIG`) names. Lists are separated
by commas. `--NAME` and `--no-NAME` switch a setting on and off.

An unknown flag, variable `DECANT_*` or key ends the process with an error that names it, and so does a bad value.
[Tune](../guides/tune.md) says which settings matter."""
WORKER = "`decant prefill-worker` and `decant decode-worker` have the same settings."


def render() -> str:
    router, prefill, decode = (kind.model_fields for kind in (RouterSettings, PrefillSettings, DecodeSettings))
    shared = [name for name in router if name in decode and _same(router[name], decode[name])]
    parts = [head("Settings", "the settings classes"), INTRO]
    parts += ["## Router", _table(router, [name for name in router if name not in shared])]
    parts += ["## Workers", WORKER, _table(decode, [name for name in decode if name not in shared], prefill)]
    parts += ["## All processes", _table(router, shared)]
    own = GatewaySettings.model_fields
    logging = [name for name in own if name in shared and _same(own[name], router[name])]
    *most, last = map(_flag, logging)
    also = f"It has {', '.join(most)} and {last} of all processes too."
    return page([*parts, "## Gateway", also, _table(own, [name for name in own if name not in logging])])


def _same(one: FieldInfo, other: FieldInfo) -> bool:
    return one.description == other.description and one.default == other.default


def _table(fields: dict[str, FieldInfo], names: Iterable[str], others: dict[str, FieldInfo] | None = None) -> str:
    rows = [(_flag(name), _default(fields[name], (others or fields)[name]), _meaning(fields[name])) for name in names]
    return table(("setting", "default", ""), rows)


def _flag(name: str) -> str:
    return code("--" + name.replace("_", "-"))


def _default(field: FieldInfo, other: FieldInfo) -> str:
    return _value(field) if other.default == field.default else f"prefill {_value(other)}, decode {_value(field)}"


def _value(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None or field.default == ():
        return "unset"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return code(f"{field.default:g}" if isinstance(field.default, float) else field.default)


def _meaning(field: FieldInfo) -> str:
    allowed = _allowed(field)
    return sentence(field.description or "") + (f" {sentence(allowed)}" if allowed else "")


def _allowed(field: FieldInfo) -> str:
    kinds = [field.annotation, *get_args(field.annotation)]
    choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    if choices:
        return "One of " + ", ".join(map(code, choices))
    low = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
    high = next((bound.le for bound in field.metadata if isinstance(bound, Le)), None)
    if low is not None and high is not None:
        return f"{low} to {high}"
    return ", ".join(_bounds(field.metadata))


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for bound in metadata:
        match bound:
            case Ge(low):
                yield f"at least {low}"
            case Gt(low):
                yield f"above {low}"
            case Le(high):
                yield f"at most {high}"
            case Lt(high):
                yield f"below {high}"
            case MinLen(length) if length > 1:
                yield f"at least {length} characters"
            case MaxLen(length):
                yield f"at most {length} characters"
