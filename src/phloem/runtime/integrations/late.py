"""Cache objects of `transformers` whose layers are filled when the model comes to them.

A forward pass reads nothing of a layer's KV before it calls the layer's `update`, and nothing of
its states before it looks them up; all that it asks of a layer earlier is how many tokens it holds.
So these three are what a layer that is still to come answers differently. Whoever reads its data by
another way finds none, and fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from phloem.runtime.integrations.transformers import CacheLayer

__all__ = ["late_kv", "late_states"]


class _Late(dict[int, "Tensor | None"]):
    """The states of a layer that are still to come."""

    def __init__(self, held: dict[int, Tensor | None], fill: Callable[[], None]) -> None:
        super().__init__(held)
        self._fill = fill

    def __getitem__(self, number: int) -> Tensor | None:
        self._fill()
        return super().__getitem__(number)


def late_kv(layer: CacheLayer, length: int, gather: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Have an empty layer hold the KV of `length` tokens: what `gather` gives, once it is read.

    If `gather` raises, so does whatever in the pass has read it.
    """
    own = vars(layer)

    def update(keys: Tensor, values: Tensor, *more: object, **named: object) -> object:
        held = gather()
        del own["update"], own["get_seq_length"]  # what the class has is in force again
        layer.update(*held)
        return layer.update(keys, values, *more, **named)

    own["update"] = update
    own["get_seq_length"] = lambda: length


def late_states(layer: CacheLayer, fill: Callable[[], None]) -> None:
    """Have `fill` called before the first state of a layer is read; it writes into those it has."""
    conv, recurrent = layer.conv_states, layer.recurrent_states

    def once() -> None:
        layer.conv_states, layer.recurrent_states = conv, recurrent
        fill()

    layer.conv_states, layer.recurrent_states = _Late(conv, once), _Late(recurrent, once)
