"""Flags that several commands share."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, cast, get_type_hints

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from noloco_p2p.errors import SettingsError
from noloco_p2p.settings import GROUPS, Flag, PeerSettings, kind_of
from noloco_p2p.ticket import contents

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set a field of the spec: KEY=VALUE, for example outer.alpha=0.3. Can be repeated."),
]


class Grouped(TyperCommand):
    """A command whose help has the flags of settings in their groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections = dict[str, list[tuple[str, str]]]({"Arguments": [], "Options": []} | {name: [] for name in GROUPS})
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections[getattr(parameter, "rich_help_panel", None) or kind].append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def takes_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter `settings` of a command with the flags of the named settings, or of all settings by
    default.

    The command receives PeerSettings, which also contain the values from the other sources.
    """
    fields = {name: PeerSettings.model_fields[name] for name in names or PeerSettings.model_fields}

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(verb, include_extras=True)

        @wraps(verb)
        def run(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in fields}
            for name, value in given.items():
                if isinstance(value, list):  # empty if the flag was not given
                    given[name] = [contents(word) for word in value] or None
            verb(**arguments, settings=PeerSettings.load(given))

        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(verb).parameters.values():
            if own.name == "settings":
                parameters += [_option(name, field) for name, field in fields.items()]
            else:
                parameters.append(own.replace(kind=own.KEYWORD_ONLY, annotation=hints[own.name]))
        cast("Any", run).__signature__ = inspect.Signature(parameters)
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    flag, kind = Flag.of(name, field), kind_of(field.annotation)
    kind = list[str] if kind in (tuple, dict) else kind
    text = f"{field.description}  [default: {flag.default}]" if flag.default else field.description
    group = next(group for group, names in GROUPS.items() if name in names)
    option = typer.Option(None, flag.name, metavar=flag.metavar, help=text, show_default=False, rich_help_panel=group)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


def parse_duration(text: str, *, flag: str) -> float:
    """Convert a duration like `90s`, `30min`, `12h` or `7d` to seconds. Raises SettingsError for any other form."""
    match = re.fullmatch(r"(\d{1,6})(s|min|h|d)", text)
    if not match:
        raise SettingsError(f"{flag} {text!r} is not a duration such as 30min, 12h or 7d")
    return int(match[1]) * {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]


def parse_changes(changes: list[str] | None) -> dict[str, Any]:
    """Convert ["outer.alpha=0.3"] to {"outer.alpha": 0.3}. A value that is not valid TOML is kept as a string."""
    return dict(_parse(change) for change in changes or [])


def _parse(change: str) -> tuple[str, Any]:
    key, equals, text = change.partition("=")
    if not equals:
        raise SettingsError(f"--set {change!r} is not of the form KEY=VALUE, for example outer.alpha=0.3")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))
