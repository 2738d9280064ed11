"""A request of a trace, in whatever format that is, and the lines of its file."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from phloem.errors import InvalidRequest

__all__ = ["NO_TOKENS", "TokenIds", "TraceRequest", "lines_of"]

TokenIds = npt.NDArray[np.int32]
NO_TOKENS: TokenIds = np.empty(0, np.int32)


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace, `at_s` seconds after its start.

    `blocks` are ids of blocks of `block_size` tokens; the last one may be partial, or left out.
    `length` are the tokens of the prompt, `output` those of the answer, and `answer` the ids of
    their blocks in the traces that tell them.
    """

    at_s: float
    session: str
    blocks: TokenIds
    block_size: int
    length: int
    output: int
    answer: TokenIds = NO_TOKENS

    def tokens(self, *, shrink: int = 1) -> TokenIds:
        """Token ids in which exactly those prefixes are equal that were equal in the trace.

        `shrink` makes every block that many times shorter, for small simulations; a prompt keeps
        at least one token.
        """
        size = max(1, self.block_size // shrink)
        spread = self.blocks.astype(np.int64)[:, None] * size + np.arange(size)
        length = max(1, min(self.length * size // self.block_size, spread.size))
        return (spread.reshape(-1)[:length] % (2**31 - 1)).astype(np.int32)


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file, plain or gzipped, that are not blank, with their numbers from 1 on.

    Raises `InvalidRequest` where it cannot be read.
    """
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8")
        ) as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path.name} cannot be read: {error}") from error
