"""A fourth component, as somebody would add one: a class with its rule, and a row in `SPANS`."""

from __future__ import annotations

from phloem.actors.tree.components import SPANS, SpanComponent

__all__ = ["Block"]


class Block(SpanComponent):
    """Attention within blocks of so many tokens: a boundary needs the block of the last one."""

    name = "block"
    letter = "B"

    def __init__(self, text: str, number: int, page_size: int) -> None:
        super().__init__(text, number, page_size)
        self.tokens = int(text.partition(":")[2])

    def needs_from(self, boundary: int) -> int:
        """The first token of the block that the last token is in."""
        return max(0, boundary - 1) // self.tokens * self.tokens


SPANS["block"] = Block
