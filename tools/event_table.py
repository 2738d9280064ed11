"""Writes the table of events in `docs/tracing.md` from the schema; `--check` only compares.

python tools/event_table.py [--check]
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from pathlib import Path

from phloem import events
from phloem.runtime import tracing

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tracing.md"
HEAD = "| event | level | fields | |\n|---|---|---|---|\n"
BY_CONTENT = {events.CopyEnded: "debug, error", events.RuntimeStopped: "info, error"}


def table() -> str:
    """A row for each kind of event, the most urgent first."""
    kinds = [kind for kind in vars(events).values() if _is_kind(kind)]
    kinds += [kind for kind in vars(tracing).values() if _is_kind(kind)]
    return HEAD + "".join(sorted(map(_row, kinds), key=_urgency))


def _is_kind(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, events.Event) and value != events.Event


def _row(kind: type[events.Event]) -> str:
    common = events.Event.__struct_fields__
    fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__ if name not in common)
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return f"| `{kind.__name__}` | {_level(kind)} | {fields} | {text} |\n"


def _level(kind: type[events.Event]) -> str:
    number = tracing._LEVELS.get(kind)
    return BY_CONTENT[kind] if number is None else logging.getLevelName(number).lower()


def _urgency(row: str) -> tuple[int, str]:
    order = ["error", "warning", "info", "debug"]
    level = row.split(" | ")[1].split(", ")[-1]
    return order.index(level), row


def main() -> int:
    """Compare, and write unless `--check` is given; 1 when they differed and nothing was done."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(re.escape(HEAD) + r"(?:\|.*\n)*", text)
    assert found is not None, f"{PAGE} has no table of events"
    fresh = text[: found.start()] + table() + text[found.end() :]
    if fresh == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE.name} is not that of the schema: python tools/event_table.py")
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
