"""The public names and signatures are stable: a change shows up in `tests/vectors/public_api.txt`.

`NOLOCO_UPDATE_API=1 pytest tests/unit/test_public_api.py` updates that file.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import noloco_p2p

SNAPSHOT = Path(__file__).resolve().parents[1] / "vectors" / "public_api.txt"


def lines() -> Iterator[str]:
    for name in sorted(noloco_p2p.__all__):
        if name == "__version__":
            continue
        yield from described(name, getattr(noloco_p2p, name))


def described(name: str, value: Any) -> Iterator[str]:
    """Yield a line for each name: a class with its constructor or fields, then its public members."""
    if not inspect.isclass(value):
        yield f"{name}: {value!r}"
        return
    if issubclass(value, Exception):
        yield f"{name}({value.__bases__[0].__name__})"
        return
    if issubclass(value, BaseModel):
        yield f"{name}({', '.join(value.model_fields)})"
        members = {}
        for kind in value.__mro__:
            if kind.__module__.startswith("noloco_p2p"):
                members |= {key: member for key, member in vars(kind).items() if key not in members}
    else:
        yield f"{name}{re.sub(r' at 0x[0-9a-f]+', '', str(inspect.signature(value)))}"
        members = vars(value)
    fields = value.model_fields if issubclass(value, BaseModel) else {}
    for key, member in sorted(members.items()):
        if not key.startswith(("_", "model_")) and key not in fields:
            yield f"{name}.{key}{shape(member)}"


def shape(member: Any) -> str:
    if isinstance(member, property):
        assert member.fget is not None
        settable = ", settable" if member.fset else ""
        return f": {inspect.signature(member.fget).return_annotation}{settable}"
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if callable(function) and not isinstance(function, Enum):
        return str(inspect.signature(function))
    return ""


def test_public_names_and_signatures_are_those_of_the_snapshot() -> None:
    found = "\n".join(lines()) + "\n"
    if os.environ.get("NOLOCO_UPDATE_API"):
        SNAPSHOT.write_text(found, encoding="utf-8")
    assert found == SNAPSHOT.read_text(encoding="utf-8")


def test_a_type_checker_and_python_see_the_same_names() -> None:
    assert sorted(noloco_p2p._MODULE_OF) == sorted(set(noloco_p2p.__all__) - {"__version__"})


def test_every_public_thing_has_a_docstring() -> None:
    for name in noloco_p2p.__all__:
        value = getattr(noloco_p2p, name)
        assert name == "__version__" or (value.__doc__ and not value.__doc__.startswith(f"{name}(")), name


def test_the_package_itself_imports_neither_torch_nor_hivemind() -> None:
    code = "import sys, noloco_p2p; print({'torch', 'hivemind'} & {name.split('.')[0] for name in sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"
