"""Whether everything that the tree has, on the device and on the host, holds what it should."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from phloem.actors.tree.keys import Namespace
from phloem.actors.tree.node import NO_SLOT, Node
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.cuda_streams.rows import RowPool
from phloem.runtime.core import Core
from phloem.runtime.simulation.model import Violation, Words, layer_salt
from phloem.runtime.simulation.tags import TaggedTokens

__all__ = ["check_contents"]


class _Tier:
    """The bytes of one tier as words: KV by page, key or value, and token; states by slot."""

    def __init__(
        self,
        name: str,
        kv: RowPool,
        states: RowPool,
        page_size: int,
        spans: Mapping[str, RowPool] | None = None,
    ) -> None:
        self.name = name
        self._size = page_size
        # Keys, then values, each padded to whole units of the pool.
        self._kv = {
            component: [rows.reshape(len(rows), 2, -1)[:, :, :page_size] for rows in _words(pool)]
            for component, pool in {"kv": kv, **(spans or {})}.items()
        }
        self._states = list(_words(states))

    def check_kv(
        self, tokens: TaggedTokens, node: Node, page_ids: bytes, component: str = "kv"
    ) -> None:
        """What a node has of a component is for the last tokens of its edge."""
        pages = np.frombuffer(page_ids, np.int32)
        start = node.end - len(pages) * self._size
        for layer, words in enumerate(self._kv[component]):
            held = words[pages].transpose(1, 0, 2).reshape(2, -1)
            expected = tokens.kv(start, node.end) ^ layer_salt(layer)
            wrong = (held[0] != expected) | (held[1] != np.arange(start, node.end))
            if wrong.any():
                at = int(wrong.argmax())
                kind = "page" if component == "kv" else f"{component} page"
                raise Violation(
                    f"{self.name} {kind} {pages[at // self._size]}, layer {layer}, is of node "
                    f"{node.id} and holds what was written for position {held[1][at]}, not token "
                    f"{start + at}"
                )

    def check_state(self, tokens: TaggedTokens, node: Node, slot: int) -> None:
        for layer, words in enumerate(self._states):
            if not np.array_equal(words[slot], tokens.state(node.end) ^ layer_salt(layer)):
                position = int(words[slot][2] ^ layer_salt(layer))
                raise Violation(
                    f"{self.name} slot {slot}, layer {layer}, is of node {node.id} and holds a "
                    f"state of position {position}, not {node.end}"
                )


def _words(pool: RowPool) -> Iterator[Words]:
    for layer in range(pool.layers):
        for part in pool.parts(layer):
            yield part.numpy().view(np.int64)


def check_contents(
    core: Core,
    pools: DevicePools,
    host: HostPools | None,
    is_written: Callable[[Namespace], bool],
) -> None:
    """Compare every page and state of the tree with its tags, while nothing is in flight.

    Raises `Violation`. Namespaces that no model has written are left out (`is_written`).
    """
    size = pools.page_size
    device = _Tier("device", pools.kv_rows, pools.state_rows, size, pools.span_rows)
    below = None if host is None else _Tier("host", host.kv_rows, host.state_rows, size)
    for (adapter, salt, _), root in core.tree.radix.roots.items():
        namespace = Namespace(adapter, salt)
        if is_written(namespace):
            for path in _new_parts_of_paths(root):
                tokens = TaggedTokens(_tokens(path[-1]), namespace, size)
                for node in path:
                    device.check_kv(tokens, node, node.page_ids)
                    for span, held in zip(core.tree.spans, node.spans, strict=True):
                        device.check_kv(tokens, node, held.page_ids, span.name)
                    if node.state != NO_SLOT:
                        device.check_state(tokens, node, node.state)
                    if below is not None and node.host is not None:
                        below.check_kv(tokens, node, node.host.page_ids)
                        if node.host.state != NO_SLOT:
                            below.check_state(tokens, node, node.host.state)


def _new_parts_of_paths(root: Node) -> Iterator[list[Node]]:
    """For each leaf the end of its path that was not in one before, every node once."""
    stack: list[tuple[Node, list[Node]]] = [(root, [])]
    while stack:
        node, path = stack.pop()
        if node.parent is not None:
            path.append(node)
        children = list((node.children or {}).values())
        if not children and path:
            yield path
        for number, child in enumerate(children):
            stack.append((child, path if number == 0 else []))


def _tokens(node: Node) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    edges: list[bytes] = []
    at: Node | None = node
    while at is not None:
        edges.append(at.edge)
        at = at.parent
    return np.frombuffer(b"".join(reversed(edges)), np.int32)
