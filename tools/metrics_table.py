"""Writes the table of metrics in `docs/observe.md` from the code; `--check` only compares.

python tools/metrics_table.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from phloem.runtime.observe.metrics import METRICS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "observe.md"
BEGIN, END = "<!-- metrics -->\n", "<!-- /metrics -->\n"


def table() -> str:
    """A row for each metric."""
    rows = [
        f"| `{name}` | {about.kind} | {', '.join(f'`{label}`' for label in about.labels)} | "
        f"{about.text} |\n"
        for name, about in METRICS.items()
    ]
    return "| metric | kind | labels | |\n|---|---|---|---|\n" + "".join(rows)


def main() -> int:
    """Compare, and write unless `--check` is given; 1 when they differed and nothing was done."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    fresh = f"{before}{BEGIN}{table()}{END}{after}"
    if fresh == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE.name} is not that of the code: python tools/metrics_table.py")
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
