"""`make check-report`: the report in a real browser, the timeline in Perfetto's own reader.

Both only where they are on the PATH. The pictures in `build/` are to be looked at by eye.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from observe.driver import Driver, config

from phloem import CacheRuntime
from phloem.runtime.cli import main
from phloem.runtime.tracing import open_log

pytestmark = pytest.mark.skipif("PHLOEM_CHECK_REPORT" not in os.environ, reason="check-report only")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
READER = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
PICTURES = Path(__file__).resolve().parent.parent.parent / "build"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--window-size=1120,3900"),
]

USE = """<script>
const press = (key) => document.querySelector("#reuse svg").dispatchEvent(
  new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
press("End"); press("Home"); press("ArrowRight");
const says = document.getElementById("says");
const said = says.textContent;
press("Escape");
const hushed = String(says.textContent === "");
document.querySelector("#tree svg").dispatchEvent(
  new KeyboardEvent("keydown", { key: "Home", bubbles: true, cancelable: true }));
const node = says.textContent;
const sort = document.querySelector("#requests th:nth-child(2) button");
const column = () => [...document.querySelectorAll("#requests td:nth-child(2)")].map(
  (cell) => Number(cell.textContent));
sort.click(); const down = column(); sort.click(); const up = column();
const sorted = String(down.every((v, n) => !n || down[n - 1] >= v)
  && up.every((v, n) => !n || up[n - 1] <= v));
document.getElementById("theme").click();
Object.assign(document.body.dataset, { said, hushed, node, sorted });
</script>"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "events.jsonl"

    async def run() -> None:
        async with CacheRuntime(config(True, host="write_through"), events=sink) as cache:
            driver = Driver(cache, 11)
            for number in range(600):
                await driver.operate()
                if number % 10 == 0:
                    await asyncio.sleep(0.002)
            tree = cache.core.tree
            while tree.radix.nodes < 10 or not any(not node.page_ids for node in tree.radix):
                await driver.operate()  # until there is something to see in both tiers

    with open_log(path) as sink:
        asyncio.run(run())
    return path


def browse(page: Path, profile: Path, *flags: str) -> tuple[str, str]:
    """What the browser prints, and what pages have logged."""
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    logged = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(logged)


@pytest.mark.skipif(BROWSER is None, reason="no browser on the PATH")
def test_the_report_in_a_browser(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(log), "-o", str(page)]) == 0
    text = page.read_text()
    PICTURES.mkdir(exist_ok=True)
    for theme in ("light", "dark"):
        themed = tmp_path / f"{theme}.html"
        themed.write_text(
            text.replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">')
        )
        picture = PICTURES / f"report-{theme}.png"
        _, logged = browse(themed, tmp_path / theme, f"--screenshot={picture}")
        assert not logged, logged
        assert picture.stat().st_size > 50_000
    used = tmp_path / "used.html"
    used.write_text(text.replace("</body>", f"{USE}</body>"))
    dom, logged = browse(used, tmp_path / "used", "--dump-dom")
    assert not logged, logged
    assert re.search(r'data-theme="(light|dark)"', dom)
    assert 'data-sorted="true"' in dom
    assert 'data-hushed="true"' in dom
    assert re.search(r'data-node="node \d+: tokens 0 to \d+, on the (device|host)', dom)
    assert re.search(r'data-said="[\d.]+ s( · [a-z, ]+ \d+)*"', dom), "the keyboard says a row"


@pytest.mark.skipif(READER is None, reason="no trace processor on the PATH")
def test_the_timeline_in_perfettos_reader(log: Path, tmp_path: Path) -> None:
    assert READER is not None
    trace, query = tmp_path / "trace.json", tmp_path / "query.sql"
    assert main(["trace", str(log), "--perfetto", str(trace)]) == 0
    query.write_text("select count(*) from slice; select count(*) from flow;")
    done = subprocess.run(
        [READER, "-q", str(query), str(trace)], capture_output=True, text=True, timeout=240,
        check=True,
    )  # fmt: skip
    counts = [int(line) for line in done.stdout.split() if line.isdigit()]
    assert len(counts) == 2 and min(counts) > 100
