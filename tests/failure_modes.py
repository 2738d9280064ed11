"""Faults known from systems that do the same job: which tests try them, or what will.

A test bears the ids it tries in its name (`test_f021_...`). Run this file to print the table.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

# Every known fault, in a few words.
FAILURE_MODES: dict[str, str] = {
    "F-001": "Two release paths both own the last slot",
    "F-002": "The same slot appears twice in one release list",
    "F-003": "Deferred release drained after a flush",
    "F-004": "Tier tag changed before leaving the old free list",
    "F-005": "State copy made by match is lost when admission fails",
    "F-006": "Record removed before the readiness check",
    "F-007": "Last reference drops while pinned; unpin does not free",
    "F-008": "A request that must not be cached makes no progress",
    "F-009": "Tear-down of a failed admission releases by a field not yet set",
    "F-010": "Eviction picks a pinned entry",
    "F-011": "Suspended request keeps its pending-restore budget",
    "F-012": "Lock skipped an empty component, release did not",
    "F-013": "Lock walk starts at the parent",
    "F-014": "Size counters drift when a leaf gets its first child",
    "F-015": "Early partial release followed by the full release",
    "F-016": "Retrieve unpins what the lookup record will unpin too",
    "F-017": "Resume takes a new lock and forgets the old one",
    "F-018": "Host source of a load-back is reclaimed before the copy ends",
    "F-019": "One eviction sweep frees host pages it has just targeted",
    "F-020": "Slots returned at finish while the next step still writes them",
    "F-021": "Allocation evicts the prefix it has just matched",
    "F-022": "Making room for a store evicts part of the same store",
    "F-023": "Stores of a suspended request race with reuse of its slots",
    "F-024": "Pruning by the optimistic position",
    "F-025": "A later component lengthens the common prefix",
    "F-026": "State looked up with the wrong unit",
    "F-027": "Prefix visible before its data is written",
    "F-028": "Failed load-back falls back to the KV-only prefix",
    "F-029": "Per-path state cap must be soft",
    "F-030": "Thinning frees the device state but keeps host copies without bound",
    "F-031": "Round trip through host changes the answer",
    "F-032": "Prefix part of a split does not inherit the host lock",
    "F-033": "Match shorter than a page creates an empty node",
    "F-034": "Partial match locks more than it matched",
    "F-035": "Page-hash list not divided with the key",
    "F-036": "State and its lock must stay on the suffix",
    "F-037": "Duplicate slots freed while the request's table still points to them",
    "F-038": "Provisional publish changes more than the follow-up match accepts",
    "F-039": "Donated state although the node has one already",
    "F-040": "One slot listed under two nodes",
    "F-041": "Key shorter than a page",
    "F-042": "Zero or negative cacheable length at finish",
    "F-043": "Common alignment unit far larger than prompts",
    "F-044": "Identical prompt reuses nothing because one token must be recomputed",
    "F-045": "Failed parent backup leaves a gap in the chain",
    "F-046": "Wrong test for 'no child on host'",
    "F-047": "Clean-up cascade removes a parent still used by an upload or prefetch",
    "F-048": "State of an inner node is dropped without backup, host KV becomes unreachable",
    "F-049": "Stub nodes hide data that exists in storage",
    "F-050": "Write-back eviction forgets parent and device slots",
    "F-051": "Load failure must roll back to the last good page",
    "F-052": "Failed transfer counted as finished",
    "F-053": "I/O error skips the reference drop",
    "F-054": "KV restored without its side data",
    "F-055": "Stale 'exists' belief after a failed fetch",
    "F-056": "Zero of zero pages counts as complete",
    "F-057": "Transfer descriptor with wrong shape, device or length",
    "F-058": "Abort between match and adoption",
    "F-059": "Abort while a load writes into the request's slots",
    "F-060": "Clean-up uses an id, the table uses a handle",
    "F-061": "Rejected request keeps its references",
    "F-062": "Reset leaves the previous worker running",
    "F-063": "Failed store stays visible",
    "F-064": "Several writers share a key",
    "F-065": "First failing batch ends the upload, the node still counts as stored",
    "F-066": "Concurrent writes of one key",
    "F-067": "Lease ends during a long batch read",
    "F-068": "Storage key does not describe the layout",
    "F-069": "File truncated under a reader",
    "F-070": "Backup does not wait for the compute stream",
    "F-071": "Pinned staging buffer rewritten while its copy is pending",
    "F-072": "Host buffer read before the non-blocking copy has finished",
    "F-073": "Two 'dedicated' streams are the same stream",
    "F-074": "Event recorded again, or queried before it was recorded",
    "F-075": "Copies issued on whatever stream is current",
    "F-076": "Busy wait with nothing evictable",
    "F-077": "Restored prefixes fill the pool, no room to compute",
    "F-078": "Exact fit refused because of one page of slack",
    "F-079": "Request suspends itself and starts again from zero",
    "F-080": "One allocation path forgets to evict",
    "F-081": "Timeout overridden by a pending side transfer",
    "F-082": "Peers take different decisions from local timing",
    "F-083": "Optional checkpoint allocation is treated as mandatory",
    "F-084": "Only one component is evicted for a shared budget",
    "F-085": "Failed pinning poisons the next kernel launch",
    "F-086": "One slow event keeps all pinned blocks busy",
    "F-087": "All optional checkpoints dropped because not all fit",
    "F-088": "Fixed eviction of one slot is not enough",
    "F-089": "One huge registration fails although memory is there",
    "F-090": "Recursion over tree depth",
    "F-091": "Per-token Python objects for million-token keys",
    "F-092": "Weak or predictable page hash",
    "F-093": "Hash differs per process",
    "F-094": "Writer and reader derive keys from different forms",
    "F-095": "Namespace parts joined without separators",
    "F-096": "Namespace honoured in the tree but not in storage",
    "F-097": "Two implementations of the salted hash drift",
    "F-098": "Eviction cost grows with the number of leaves",
    "F-099": "Shallow states go first, branches lose everything",
    "F-100": "All requests queue behind one load",
    "F-101": "Finished copies become usable only when the request ends",
    "F-102": "Spin-waiting on events",
    "F-103": "Large copies block small urgent ones",
    "F-104": "Queue get cancelled at the moment of hand-over",
    "F-105": "Cancelled lock waiter strands later ones",
    "F-106": "Scope or task group closed by another task",
    "F-107": "Reply to a caller that has gone kills the actor",
    "F-108": "Fire-and-forget task is collected",
    "F-109": "Order of thread callbacks and futures is not fixed",
    "F-110": "Logging context of the wrong task",
    "F-111": "Blocking primitive inside the loop",
    "F-112": "Shutdown waits for a side task that ate its cancel",
    "F-113": "Aborted turn overwrites the session's data",
    "F-114": "Request of a closed session finishes late",
    "F-115": "Close of one of two sharers",
    "F-116": "Split announces removal",
    "F-117": "Host 'stored' message after a split covers only the suffix",
}

# What will try the faults that no test tries yet: capabilities that the cache does not have.
CAPABILITIES = {"storage tier", "cache events"}
LATER: dict[str, str] = {
    "F-006": "storage tier",
    "F-035": "cache events",
    "F-049": "storage tier",
    "F-054": "storage tier",
    "F-055": "storage tier",
    "F-056": "storage tier",
    "F-063": "storage tier",
    "F-064": "storage tier",
    "F-065": "storage tier",
    "F-066": "storage tier",
    "F-067": "storage tier",
    "F-068": "storage tier",
    "F-069": "storage tier",
    "F-081": "storage tier",
    "F-092": "storage tier",
    "F-094": "storage tier",
    "F-096": "storage tier",
    "F-097": "storage tier",
    "F-117": "cache events",
}

TESTS = Path(__file__).parent
OFF = r"mark\.(skip|xfail)\b"


def tests_by_id(pattern: str) -> dict[str, list[str]]:
    """Test functions by the ids in their names; `pattern` finds one id, a `Path` stands first.

    A test that is always skipped, or expected to fail, shows nothing and is left out.
    """
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            if node.name.startswith("test_") and not any(re.search(OFF, mark) for mark in marks):
                for one in re.findall(pattern, node.name):
                    found.setdefault(one, []).append(f"{file.relative_to(TESTS)}::{node.name}")
    return found


def tried() -> dict[str, list[str]]:
    """The tests of each fault that has any."""
    return {f"F-{one}": tests for one, tests in tests_by_id(r"(?<=_f)(\d{3})(?=_)").items()}


if __name__ == "__main__":
    tests = tried()
    for one, title in FAILURE_MODES.items():
        print(one, title, "->", ", ".join(tests.get(one, [])) or f"later: {LATER[one]}")
