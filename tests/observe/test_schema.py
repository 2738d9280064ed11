"""The schema of events is fixed by a golden file; old logs are read or refused clearly."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from phloem import InvalidRequest, events
from phloem.runtime.observe.explain import explain_request
from phloem.runtime.observe.history import replay
from phloem.runtime.tracing import EventsDropped, LogOpened, read_log

DATA = Path(__file__).parent / "data"


def schema() -> dict[str, object]:
    """Every event and change: its fields, their types, and which have defaults."""
    kinds = [events.Event, *events.Event.__subclasses__(), events.Victim, *get_args(events.Change)]
    described: dict[str, object] = {"version": events.SCHEMA}
    for kind in sorted(set(kinds), key=lambda kind: kind.__name__):
        fields = msgspec.structs.fields(kind)
        described[kind.__name__] = {
            field.encode_name: f"{_name(field.type)}{'' if field.required else ' = default'}"
            for field in fields
        }
    return described


def _name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def test_the_schema_is_the_golden_one() -> None:
    """Whoever changes it runs this module as a program, and raises the version if need be."""
    golden = msgspec.json.decode((DATA / "schema2.json").read_bytes())
    now = msgspec.json.decode(msgspec.json.encode(schema()))
    assert now["version"] == golden["version"]
    for kind, fields in golden.items():
        if kind == "version":
            continue
        assert kind in now, f"{kind} has gone: that needs a new version"
        for name, said in fields.items():
            assert now[kind].get(name) == said, f"{kind}.{name} changed: that needs a new version"
        for name, said in now[kind].items():
            assert name in fields or said.endswith("= default"), f"{kind}.{name} has no default"
    assert now == golden, "additions: run this module as a program to renew the golden file"


def test_a_log_of_the_first_schema_is_read() -> None:
    path = DATA / "schema1.ndjson"
    entries = list(read_log(path))
    assert [type(entry.event).__name__ for entry in entries[:3]] == [
        "RuntimeStarted",
        "RequestOpened",
        "LeaseTaken",
    ]
    explanation = explain_request(path, "r1")
    assert (explanation.tokens, explanation.usable) == (9, 0)
    with pytest.raises(InvalidRequest, match="the log is of schema 1, or leaves events out"):
        replay(path).state()


def test_kinds_of_logs_are_in_the_schema() -> None:
    assert {LogOpened, EventsDropped} <= set(events.Event.__subclasses__())


if __name__ == "__main__":
    text = msgspec.json.format(msgspec.json.encode(schema()), indent=2)
    (DATA / "schema2.json").write_bytes(text + b"\n")
