"""Importing the package of the callbacks is cheap; a missing trainer is reported with the package to install."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

LOADED = """
import sys, noloco_p2p.integrations
assert not {"torch", "transformers", "lightning", "accelerate"} & set(sys.modules)
"""


def test_the_package_imports_no_trainer() -> None:
    subprocess.run([sys.executable, "-c", LOADED], check=True)


@pytest.mark.parametrize(("name", "missing"), [("huggingface", "accelerate"), ("lightning", "lightning")])
def test_a_missing_trainer_is_named(name: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [*sys.modules]:
        if module.split(".")[0] == missing:
            monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"noloco_p2p.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"requires .*: pip install '{missing}>="):
        importlib.import_module(f"noloco_p2p.integrations.{name}")
