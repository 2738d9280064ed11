"""The table of mutants fits the source, and a few of them are found."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load() -> ModuleType:
    """The script beside this file, which is no package."""
    path = Path(__file__).parent / "mutants.py"
    spec = importlib.util.spec_from_file_location("phloem_mutants", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


mutants = _load()


def test_every_mutant_changes_one_line_of_the_source_as_it_is() -> None:
    everyone = [*mutants.MUTANTS, *(mutant for mutant, _ in mutants.KILLED_BY)]
    names = [mutant.name for mutant in everyone]
    assert len(set(names)) == len(names) > len(mutants.MUTANTS) >= 25
    for mutant in everyone:
        text = (mutants.PACKAGE / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.name}: adapt its line to {mutant.file}"
        assert mutant.old != mutant.new


@pytest.mark.parametrize("name", ["the page table is not rewritten"])
def test_a_mutant_is_found(name: str) -> None:
    (mutant,) = (mutant for mutant in mutants.MUTANTS if mutant.name == name)
    found = mutants.hunt(mutant, starts=(0,), seeds_max=200)
    assert found.seeds[0] is not None, found


def test_a_mutant_that_runs_hardly_find_is_killed_by_its_test() -> None:
    mutant, killer = mutants.KILLED_BY[0]
    assert mutants.is_killed(mutant, killer)
