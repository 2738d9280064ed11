"""The samples that ship with the package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from phloem.errors import InvalidRequest
from phloem.runtime.traces.readers import read_trace
from phloem.runtime.traces.request import TraceRequest

__all__ = ["SAMPLES", "sample"]

_DATA = Path(__file__).parent / "data"

SAMPLES: Mapping[str, Path] = {
    path.name.partition(".")[0]: path for path in sorted(_DATA.glob("*.gz"))
}
"""The files by name; `data/README.md` says what they are."""


def sample(name: str) -> Iterator[TraceRequest]:
    """The requests of the sample called `name`; raises `InvalidRequest` for an unknown one."""
    path = SAMPLES.get(name)
    if path is None:
        raise InvalidRequest(f"no sample is called {name!r}; there are {tuple(SAMPLES)}")
    return read_trace(path)
