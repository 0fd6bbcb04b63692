"""Run specs to start from, and the commented TOML of any spec. This module does not import torch."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from pydantic.fields import FieldInfo

from noloco_p2p.spec import Section, TrainerSpec
from noloco_p2p.telemetry.console import count, counted

_FILE = Path(__file__).with_name("presets.toml")
PRESETS = {
    name: TrainerSpec.from_dict({"name": name, **values}, origin=str(_FILE))
    for name, values in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}
FIRST_SECTIONS = ("model", "data", "train")  # first in a file; the other sections follow in the order of the fields
TOKENS_PER_PARAMETER = 20  # with which a given amount of compute reaches about the lowest loss (arXiv 2203.15556)


def render(spec: TrainerSpec) -> str:
    """Render a spec as TOML that loads back as an equal spec. The description of each field becomes a comment.

    Keys begin at column 0. An optional key that is not set becomes a comment, because TOML has no null.
    """
    tokens = spec.train.batch_size * spec.data.sequence_length
    lines = [
        "# This is a run spec of noloco_p2p, which all peers of one run share.",
        f"# Model: {describe_size(spec)}.",
        f"# Each peer reads {tokens:,} tokens per inner step, and {tokens * spec.train.total_steps:,} in its schedule.",
        "# Start the run with `noloco join FILE`. If you change a setting, the file defines a new run. To start the "
        "new run from the weights of this one, use `noloco fork`.",
        "",
        *_assignments(spec),
    ]
    for name, about, _ in sections():
        lines += ["", f"[{name}]", f"# {about}", *_assignments(attrgetter(name)(spec))]
    return "\n".join(lines) + "\n"


def sections(model: type[Section] = TrainerSpec, prefix: str = "") -> Iterator[tuple[str, str, type[Section]]]:
    """Yield the dotted name, the description and the model of each section, in the order of a spec file."""
    for name in sorted(model.model_fields, key=lambda name: name not in FIRST_SECTIONS):
        field = model.model_fields[name]
        if is_section(field):
            section = cast("type[Section]", field.annotation)
            yield f"{prefix}{name}", " ".join((section.__doc__ or "").partition("\n\n")[0].split()), section
            yield from sections(section, f"{prefix}{name}.")


def is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def describe_size(spec: TrainerSpec) -> str:
    """Describe the number of parameters of the model."""
    num_parameters = spec.model.num_parameters()
    if not num_parameters:
        return f"the model {spec.model.pretrained!r}"
    share = "tied" if spec.model.tied_embeddings else "untied"
    return f"{num_parameters:,} parameters ({share} embeddings, vocabulary {spec.model.vocab_size:,})"


def describe_tokens(spec: TrainerSpec) -> str:
    """Describe the tokens of the run. A model that is trained from scratch is compared with TOKENS_PER_PARAMETER."""
    num_parameters, reader = spec.model.num_parameters(), "head" if spec.pipeline.stages > 1 else "peer"
    tokens = spec.train.total_steps * spec.train.batch_size * spec.data.sequence_length
    text = f"each {reader} reads {count(tokens)} in its schedule"
    if not num_parameters or spec.model.lora.rank:
        return text
    share = tokens / num_parameters
    num_readers = math.ceil(TOKENS_PER_PARAMETER / share)
    verb = "reaches" if num_readers == 1 else "together reach"
    return (
        f"{text}, {count(share) if share >= 10 else f'{share:.2g}'} per parameter; "
        f"{counted(num_readers, reader)} {verb} {TOKENS_PER_PARAMETER}, the usual number for training from scratch"
    )


def _assignments(section: Section) -> list[str]:
    values = section.model_dump(mode="json")
    lines = []
    for key, field in type(section).model_fields.items():
        if not is_section(field):
            assignment = f"# {key} =" if values[key] is None else f"{key} = {_toml(values[key])}"
            lines.append(f"{assignment}  # {field.description}")
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # a basic TOML string
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
