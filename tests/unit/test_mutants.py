"""The mutants of `make mutants` still apply, and the tests that must catch them still exist."""

from __future__ import annotations

import ast

import pytest
from mutants.run import CHECKOUT, MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_put_into_the_code(mutant: Mutant) -> None:
    changed = mutant.text(CHECKOUT)
    assert changed != (CHECKOUT / mutant.file).read_text(encoding="utf-8")
    ast.parse(changed)
    path, _, node = mutant.test.partition("::")
    tree = ast.parse((CHECKOUT / path).read_text(encoding="utf-8"))
    functions = [item for item in tree.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert node.partition("[")[0] in {function.name for function in functions}, mutant.test


def test_an_old_text_that_is_gone_or_not_alone_is_told() -> None:
    first = MUTANTS[0]
    for old, times in (("no such text anywhere", 0), ("import", 2)):
        changed = Mutant(first.name, first.fault, first.file, old, "", first.test)
        with pytest.raises(ValueError, match="must occur once") as told:
            changed.text(CHECKOUT)
        assert times or "occurs 0 times" in str(told.value)
