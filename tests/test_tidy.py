"""House rules: sizes, docstrings, words that do not belong, examples and documents that run."""

from __future__ import annotations

import ast
import inspect
import os
import pydoc
import re
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

import phloem
from phloem import errors

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src" / "phloem").rglob("*.py"))
SCRIPTS = sorted(
    path
    for folder in ("tests", "examples", "benchmarks", "tools")
    for path in (ROOT / folder).rglob("*.py")
)
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

LINES_MAX, TEST_LINES_MAX = 560, 800
HOSTS = {"github.com", "download.pytorch.org", "www.apache.org", "arxiv.org", "example.com"}
SYSTEM_PATHS = {"dev", "proc", "sys", "usr", "bin", "nonexistent"}

ABSOLUTE_PATH = re.compile(r"""(?:^|[\s"'`(=])/([a-z_]+)/""", re.MULTILINE)
URL = re.compile(r"https?://([\w.-]+)")
UNFINISHED = re.compile(
    r"\b(TODO|FIXME|XXX|HACK)\b|[cC]o-[aA]uthored-[bB]y|[gG]enerated (with|by) a"
)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def strangers(text: str) -> list[str]:
    """What belongs to the machine or the day on which a file was written."""
    found = [f"/{top}/" for top in ABSOLUTE_PATH.findall(text) if top not in SYSTEM_PATHS]
    found += [host for host in URL.findall(text) if host not in HOSTS]
    found += [match.group(0) for match in UNFINISHED.finditer(text)]
    return found


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS], ids=named)
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    limit = LINES_MAX if path in SOURCES else TEST_LINES_MAX
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS, *DOCUMENTS], ids=named)
def test_nothing_of_the_machine_it_was_written_on(path: Path) -> None:
    if path != Path(__file__).resolve():  # which names what it looks for
        assert not strangers(path.read_text(encoding="utf-8"))


def test_strangers_are_seen() -> None:
    assert strangers('open("/home/me/x")') == ["/home/"]
    assert strangers("see https://internal.host/x") == ["internal.host"]
    assert strangers("# TODO later") == ["TODO"]
    assert not strangers("/proc/cpuinfo, a/b/c, https://github.com/x, 3 /4/ 5")


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_public_things_say_what_they_are(path: Path) -> None:
    """Modules, public classes and public functions; not the bodies of protocols and overloads."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.stem.startswith("_") and not tree.body:
        return
    assert ast.get_docstring(tree), "the module"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.name.startswith("_") or ast.get_docstring(node), node.name


@pytest.mark.parametrize("name", phloem.__all__)
def test_help_shows_what_a_user_imports(name: str) -> None:
    text: pydoc.TextDoc = pydoc.plaintext  # type: ignore[attr-defined]  # typeshed lacks it
    assert name in text.document(getattr(phloem, name), name)


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_annotations_of_classes_can_be_evaluated(path: Path) -> None:
    """As `help` and msgspec do it: what an annotation names must be there at run time."""
    if path.stem == "__main__":
        return
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    module = import_module(".".join(part for part in parts if part != "__init__"))
    for thing in vars(module).values():
        if inspect.isclass(thing) and thing.__module__ == module.__name__:
            with suppress(ValueError):  # what has no signature at all
                inspect.signature(thing)


@pytest.mark.parametrize("path", EXAMPLES, ids=named)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    ran = run([str(path)], tmp_path)
    assert ran.stdout


def test_the_readme_shows_the_quickstart() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    shown = code_blocks(ROOT / "README.md")
    assert [block.strip() for block in shown] == [code.strip()]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 25


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), target
        assert ROOT in found.resolve().parents, f"{target} leads out of the project"
        if heading:
            assert heading in headings(found), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_code_in_documents_runs(path: Path, tmp_path: Path) -> None:
    """The blocks of a page, one after another, in a process and a folder of their own."""
    blocks = code_blocks(path)
    if blocks:
        script = tmp_path / "page.py"
        script.write_text("\n\n".join(blocks), encoding="utf-8")
        run([str(script)], tmp_path)


def test_the_table_of_events_is_that_of_the_schema(tmp_path: Path) -> None:
    run([str(ROOT / "tools" / "event_table.py"), "--check"], tmp_path)


def test_every_error_is_in_the_page_of_faults() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(\w+)`", page))
    assert set(errors.__all__) - {"PoolFigures"} <= told


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *command],
        capture_output=True, text=True, timeout=240, cwd=folder, env=environment, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def headings(path: Path) -> set[str]:
    lines = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}
