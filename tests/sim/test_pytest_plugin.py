"""The plugin as somebody else's project uses it, in a pytest of its own."""

from __future__ import annotations

import re
import shlex

import pytest

CONFTEST = 'pytest_plugins = ["phloem.runtime.simulation.pytest_plugin"]\n'
TESTS = """
import asyncio
import pytest

pytestmark = pytest.mark.asyncio
LAST = []


async def racy():
    value = 0

    async def add():
        nonlocal value
        before = value
        await asyncio.to_thread(lambda: None)
        value = before + 1

    async def one_after_the_other():
        await add()
        await add()

    await asyncio.gather(one_after_the_other(), asyncio.sleep(0))
    late = asyncio.create_task(add())
    await asyncio.sleep(0.0004)
    await add()
    await late
    assert value == 4


@pytest.mark.sim(seeds=12, only=True)
async def test_only():
    await racy()


@pytest.mark.sim(seeds=12)
@pytest.mark.parametrize("what", ["a", "b"])
async def test_both(what):
    await racy()


@pytest.mark.sim(seeds=1, only=True)
async def test_unheard():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(1)


@pytest.mark.sim(seeds=1)
@pytest.mark.parametrize("what", ["a", pytest.param("b", marks=pytest.mark.not_sim("b"))])
async def test_left_out(what):
    pass


async def test_unmarked():
    pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> str:
    done = project.runpytest_inprocess("-v", "-p", "no:randomly", *arguments)
    return str(done.stdout) + str(done.stderr)


def test_failures_are_found_told_and_repeated(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=TESTS)
    out = run(project)
    outcomes = dict(re.findall(r"^test_it.py::(\S+) (PASSED|FAILED)", out, flags=re.MULTILINE))
    assert outcomes["test_unmarked"] == "PASSED" and outcomes["test_unheard"] == "FAILED"
    left = [name for name in outcomes if name.startswith("test_left_out")]
    expected = ("asyncio-a", "asyncio-b", "sim-task-0-a")
    assert sorted(left) == [f"test_left_out[{of}]" for of in expected]
    for name in ("test_only", "test_both"):
        found = {outcomes[key] for key in outcomes if key.startswith(f"{name}[sim-")}
        assert found == {"PASSED", "FAILED"}, outcomes
    repeats = re.findall(r"^repeat it with: pytest (.*)$", out, flags=re.MULTILINE)
    for name in ("test_only", "test_both", "test_unheard"):
        one = next(line for line in repeats if f"::{name}" in line)
        again = run(project, *shlex.split(one))
        assert "= 1 failed in" in again, again
        assert f"repeat it with: pytest {one}\n" in again


@pytest.mark.parametrize(
    ("marks", "told"),
    [
        ("@pytest.mark.asyncio\n@pytest.mark.sim(seed=3)\nasync ", "the mark `sim` takes"),
        ("@pytest.mark.asyncio\n@pytest.mark.not_sim\nasync ", "the mark `not_sim` takes one"),
        ("@pytest.mark.sim\n", "is marked `sim`, and pytest-asyncio does not"),
        ("@pytest.mark.sim\nasync ", "is marked `sim`, and pytest-asyncio does not"),
    ],
)
def test_marks_that_mean_nothing_are_refused(
    project: pytest.Pytester, marks: str, told: str
) -> None:
    project.makepyfile(test_it=f"import pytest\n{marks}def test_x(): pass\n")
    out = run(project)
    assert "test_it.py::test_x" in out and told in out
