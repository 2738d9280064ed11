"""Pieces of the report's page: tables, legends, figures, numbers for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from phloem.runtime.observe.charts import Band

__all__ = ["bytes_of", "details", "figure", "legend", "percent", "seconds", "table", "words"]

_UNITS = ("B", "kB", "MB", "GB", "TB")


def figure(title: str, chart: str, bands: Sequence[Band], starts: Sequence[float]) -> str:
    """A chart over time with its figures as a table, a row for each start."""
    head = ("second", *(words(band.name) for band in bands))
    rows = [
        (f"{start:.3g} s", *(f"{band.values[row]:g}" for band in bands))
        for row, start in enumerate(starts)
    ]
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{chart}"
        f"{details(table(head, rows))}</figure>"
    )


def legend(names: Mapping[str, str]) -> str:
    """Names and the style classes of their colours."""
    items = "".join(
        f'<li><i class="{css}"></i>{escape(words(name))}</li>' for name, css in names.items()
    )
    return f'<ul class="legend">{items}</ul>'


def details(content: str) -> str:
    """The table behind a figure, folded until the reader opens it."""
    return f"<details><summary>The figures as a table</summary>{content}</details>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    label: str = "",
    sortable: bool = False,
    raw: bool = False,
) -> str:
    """A table. `sortable`: its heads are buttons; `raw`: the cells are HTML already."""

    def cell(text: str) -> str:
        value = text.removesuffix(" s").removesuffix(" %")
        data = f' data-value="{value}"' if sortable and _is_number(value) else ""
        return f"<td{data}>{text if raw else escape(text)}</td>"

    heads = "".join(
        f'<th scope="col">{f"<button>{name}</button>" if sortable and name else name}</th>'
        for name in head
    )
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    css = ' class="sortable"' if sortable else ""
    named = f' role="region" aria-label="{escape(label, quote=True)}"' if label else ""
    return (
        f'<div class="scroll" tabindex="0"{named}><table{css}><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def words(name: str) -> str:
    """A name of the code as people write it."""
    return name.replace("_", " ")


def percent(part: float, whole: float) -> str:
    """`44.0 %`; of nothing it is `0 %`."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def seconds(value: float) -> str:
    """With as many digits as tell something."""
    return f"{value:.6f} s" if value < 0.01 else f"{value:.3f} s"


def bytes_of(count: float) -> str:
    """`5.95 MB`."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes all")
