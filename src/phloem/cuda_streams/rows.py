"""Memory as rows of bytes: what copies work on.

Row `i` of a `RowPool` is page `i` (or slot `i`); each model layer contributes zero or more *parts*
to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from phloem.cuda_streams.codec import Int8Codec
from phloem.errors import InvalidRequest

__all__ = ["Pair", "RowPool", "Tier"]

Tier = Literal["device", "host"]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BYTES = {word: size for size, word in _WORDS.items()}


def _word_bytes(part: Tensor) -> int:
    """The widest word that `part` (uint8 [rows, bytes]) can be seen in."""
    sizes = (part.shape[1], part.stride(0), part.storage_offset())
    return next(word for word in _WORDS if all(size % word == 0 for size in sizes))


class Pair(NamedTuple):
    """A part of a layer on its way: [count, words] each, of the widest word that fits both.

    Where one side is coded both are bytes, and `convert` makes rows of the target of the source's.
    """

    target: Tensor
    source: Tensor
    convert: Callable[[Tensor], Tensor] | None


class RowPool:
    """`count` rows of bytes, each with its parts by model layer.

    Ids are row numbers: page ids for a KV pool, slots for a state pool. Two pools with equal
    `part_bytes` can be copied between, whatever their physical order. Those are plain bytes: a
    pool below the device may keep some of its parts coded.
    """

    def __init__(
        self,
        name: str,
        tier: Tier,
        count: int,
        layers: Sequence[Sequence[Tensor]],
        *,
        whole: Tensor | None = None,
        piece_rows: int | None = None,
        codecs: Sequence[Sequence[Int8Codec | None]] | None = None,
    ) -> None:
        """`layers[l]` are the parts of model layer `l`: uint8 [count, bytes], dense in a row;
        `codecs[l]` say how they are coded, if they are.

        `whole`, for a page-first pool, is its memory [count, bytes]; the parts are views of it.
        No single copy may cross a multiple of `piece_rows` rows of it.
        """
        for parts in layers:
            for part in parts:
                shape_ok = part.dtype == torch.uint8 and part.dim() == 2
                if not shape_ok or part.shape[0] != count or part.stride(1) != 1:
                    raise InvalidRequest(
                        f"pool {name!r}: a part must be uint8 [{count}, bytes], dense in a row, "
                        f"not {part.dtype} {tuple(part.shape)} with strides {part.stride()}"
                    )
        self.name = name
        self.layer: int | None = None
        """The model layer that it is confined to, if any; see `only`."""
        self.tier: Tier = tier
        self.count = count
        self.whole = whole
        self.piece_rows = piece_rows or max(1, count)
        self.codecs = (
            tuple(map(tuple, codecs)) if codecs else tuple((None,) * len(parts) for parts in layers)
        )
        self.stored_bytes = tuple(tuple(part.shape[1] for part in parts) for parts in layers)
        self.part_bytes = tuple(
            tuple(
                size if codec is None else codec.part_bytes
                for size, codec in zip(sizes, coded, strict=True)
            )
            for sizes, coded in zip(self.stored_bytes, self.codecs, strict=True)
        )
        self._parts = tuple(tuple(parts) for parts in layers)
        self._views = tuple(
            tuple(part.view(_WORDS[_word_bytes(part)]) for part in parts) for parts in layers
        )
        self.row_bytes = sum(map(sum, self.stored_bytes)) if whole is None else whole.shape[1]
        """Bytes of one row over all layers, alignment included."""

    def __repr__(self) -> str:
        return f"RowPool({self.name!r}, {self.tier}, {self.count} rows of {self.row_bytes} bytes)"

    @property
    def layers(self) -> int:
        """The number of model layers, those without a part included."""
        return len(self._parts)

    @property
    def is_coded(self) -> bool:
        """Whether some part is not kept as plain bytes."""
        return any(codec is not None for coded in self.codecs for codec in coded)

    @property
    def is_meta(self) -> bool:
        """The rows have sizes but no bytes (torch's `meta` device): for simulations."""
        return any(part.is_meta for parts in self._parts for part in parts)

    def only(self, layer: int) -> RowPool:
        """The same memory as a pool that keeps nothing but what is of one model layer."""
        parts = [of if number == layer else () for number, of in enumerate(self._parts)]
        codecs = [of if number == layer else () for number, of in enumerate(self.codecs)]
        one = RowPool(self.name, self.tier, self.count, parts, codecs=codecs)
        one.layer = layer
        return one

    def parts(self, layer: int) -> tuple[Tensor, ...]:
        """The parts of a model layer as uint8 [count, bytes]; empty if it keeps nothing here."""
        return self._parts[layer]

    def words(self, layer: int) -> tuple[Tensor, ...]:
        """The parts of a model layer as [count, words] of the widest word that fits each."""
        return self._views[layer]

    def pairs(self, layer: int, source: RowPool) -> list[Pair]:
        """How the parts of a layer come here from `source`, which has equal `part_bytes`."""
        out: list[Pair] = []
        for number, (own, its) in enumerate(
            zip(self._parts[layer], source._parts[layer], strict=True)
        ):
            own_codec, its_codec = self.codecs[layer][number], source.codecs[layer][number]
            if own_codec == its_codec:
                mine, theirs = self._views[layer][number], source._views[layer][number]
                if mine.dtype != theirs.dtype:
                    word = min(mine.dtype, theirs.dtype, key=_BYTES.__getitem__)
                    mine, theirs = mine.view(word), theirs.view(word)
                out.append(Pair(mine, theirs, None))
            elif own_codec is not None:
                out.append(Pair(own, its, own_codec.encode))
            elif its_codec is not None:
                out.append(Pair(own, its, its_codec.decode))
        return out
