"""Where things live: the links at the top, and imports that run one way."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "phloem"
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS = {"cuda_streams": 0, "actors": 1, "runtime": 2}
LEAVES = {"errors", "events"}
ASIDE = {"__init__", "__main__", "testing"}  # what shows the package to the outside
NOT_IN_THE_TREE = {
    *("asyncio", "torch", "structlog", "anyio", "uvloop", "threading", "concurrent"),
    *("time", "datetime", "random", "secrets", "uuid"),
}


def imports_of(source: str) -> Iterator[str]:
    """The dotted names a module imports, wherever in it, type checking included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def area(dotted: str) -> str | None:
    """`actors` of `phloem.actors.tree`; None for what is not ours."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "phloem" and len(parts) > 1 else None


def faults(path: Path, source: str) -> list[str]:
    """What a module imports that it must not."""
    inside = path.relative_to(PACKAGE).with_suffix("").parts
    found: list[str] = []
    for name in imports_of(source):
        to = area(name)
        if to is not None and inside[0] in LEAVES:
            found.append(f"a leaf imports {name}")
        if inside[0] in LAYERS and to is not None and to not in LEAVES:
            if to not in LAYERS:
                found.append(f"imports {name}, which is not a layer below")
            elif LAYERS[to] > LAYERS[inside[0]]:
                found.append(f"imports {name}, which is above")
        if inside[:2] == ("actors", "tree") and inside[-1] != "actor":
            if name.split(".")[0] in NOT_IN_THE_TREE:
                found.append(f"the tree imports {name}")
            if to == "cuda_streams":
                found.append(f"the tree imports {name}")
    return found


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_the_folders_at_the_top_are_links(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("src/phloem") / name
    assert link.resolve() == PACKAGE / name


def test_every_module_has_a_place() -> None:
    for path in MODULES:
        top = path.relative_to(PACKAGE).with_suffix("").parts[0]
        assert top in {*LAYERS, *LEAVES, *ASIDE}, path


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    assert not faults(path, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("errors.py", "import phloem.events"),
        ("events.py", "from phloem import errors"),
        ("cuda_streams/pools.py", "from phloem.actors import actions"),
        ("cuda_streams/pools.py", "import phloem.runtime.cache"),
        ("actors/domain.py", "from phloem.runtime.core import Core"),
        ("actors/domain.py", "from phloem import CacheConfig"),
        ("actors/tree/radix.py", "import asyncio"),
        ("actors/tree/radix.py", "from time import monotonic"),
        ("actors/tree/radix.py", "def f():\n    import torch.cuda"),
        ("actors/tree/radix.py", "from phloem.cuda_streams import fences"),
    ],
)
def test_the_rule_sees_what_breaks_it(place: str, source: str) -> None:
    assert faults(PACKAGE / place, source)


def test_the_rule_allows_what_is_right() -> None:
    assert not faults(PACKAGE / "actors/tree/actor.py", "import asyncio")
    assert not faults(PACKAGE / "actors/domain.py", "from phloem.errors import InvalidRequest")
    assert not faults(PACKAGE / "runtime/cache.py", "import phloem.actors, phloem.cuda_streams")


def test_the_tree_needs_no_torch() -> None:
    """Imported by itself, without what `phloem` itself brings in."""
    import subprocess

    code = f"""
import sys, types
package = types.ModuleType("phloem"); package.__path__ = [{str(PACKAGE)!r}]
sys.modules["phloem"] = package
import phloem.actors.tree.tree
unwanted = {sorted(NOT_IN_THE_TREE & {"torch", "asyncio", "structlog", "anyio"})!r}
print([name for name in unwanted if name in sys.modules])
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert ran.stdout.strip() == "[]"
