"""Does the simulation find bugs? A table of them, and how many seeds each takes.

    python tests/sim/mutants.py             # all, five starts each; status 1 if one escapes
    python tests/sim/mutants.py --only fence --starts 1

Each mutant is one small change to one file of a copy of the package. A few do harm so rarely that a
test of their own kills them (`KILLED_BY`). Whether its line is still in
the source is checked by `test_mutants.py` in the ordinary run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "phloem"
SEEDS_MAX = 2_000
STARTS = (0, 100_000, 200_000, 300_000, 400_000)


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs once in the file, becomes `new`.

    `needs`: faults and uses without which it changes nothing, and "host" for a host tier. Seeds
    that lack one are counted and not run.
    """

    name: str
    file: str
    old: str
    new: str
    needs: tuple[str, ...] = ()


DOMAIN = "actors/domain.py"
ALLOCATOR = "actors/allocator.py"
WAITING = "actors/waiting.py"
TRANSFER = "actors/transfer.py"
ACTOR = "actors/tree/actor.py"
COPYING = "actors/copying.py"
TREE = "actors/tree/tree.py"
TREE_CORE = "actors/tree/core.py"
LEASES = "actors/tree/leases.py"
RADIX = "actors/tree/radix.py"
COMPONENTS = "actors/tree/components.py"
REQUEST = "runtime/request.py"
ARRIVING = "runtime/arriving.py"
HOLDING = "runtime/holding.py"
STANDING = "runtime/standing.py"
PUBLISHING = "runtime/publishing.py"
CORE = "runtime/core.py"
ARRIVING = "runtime/arriving.py"
TIERING = "actors/tree/tiering.py"
HOST_ALLOCATOR = "actors/host_allocator.py"
HOST = "actors/tree/host.py"
BACKING = "actors/tree/backing.py"
LOADING = "actors/tree/loading.py"
SHEDDING = "actors/tree/shedding.py"
OPERATIONS = "actors/tree/operations.py"
STEP = "runtime/step.py"

MUTANTS: tuple[Mutant, ...] = (
    # -- the queue
    Mutant(
        "waiting callers are not let in",
        DOMAIN,
        "if self._room and len(queue) + self._let_in < self._capacity:",
        "if False and self._let_in:",
        ("narrow",),
    ),
    Mutant(
        "what a turn sent last is handled first",
        DOMAIN,
        "entry = sent.popleft() if",
        "entry = sent.pop() if",
    ),
    Mutant(
        "a late answer is not undone",
        DOMAIN,
        "                        undo(reply.value)",
        "                        pass",
    ),
    Mutant(
        "draining stops after one batch",
        DOMAIN,
        "        if self._queue or self._sent:\n            self._schedule()",
        "        if False:\n            self._schedule()",
    ),
    # -- room
    Mutant(
        "fences of what is given back are dropped",
        ALLOCATOR,
        "if not fence.passed] if after else None",
        "if not fence.passed and False] if after else None",
    ),
    Mutant(
        "ripe places do not wake those who wait",
        ALLOCATOR,
        "            self._freed(pool.component, ids, -2)\n        self._changed()",
        "            self._freed(pool.component, ids, -2)",
    ),
    Mutant(
        "newcomers overtake",
        WAITING,
        "self._class_of(waiter).append(waiter)",
        "self._class_of(waiter).appendleft(waiter)",
    ),
    Mutant(
        "who fits is served before who waits",
        ALLOCATOR,
        "fits = not ahead and ledger.fits(",
        "fits = ledger.fits(",
    ),
    Mutant(
        "a deadlock of holders is not broken",
        ALLOCATOR,
        "        youngest = next(",
        "        return False\n        youngest = next(",
    ),
    # -- copies
    Mutant(
        "a copy does not wait for the steps before it",
        TRANSFER,
        "after = tuple(fence for fence in message.after if not fence.passed)",
        "after = tuple(fence for fence in message.after if fence.passed)",
    ),
    Mutant(
        "copies in flight touch nothing",
        TRANSFER,
        "if not copy.states.isdisjoint(slots)",
        "if copy.states.isdisjoint(slots)",
    ),
    Mutant(
        "who wrote a state is forgotten",
        TRANSFER,
        "written = tuple(f for f in self._writers.get(action.source, ()) if not f.passed)",
        "written = tuple(f for f in self._writers.get(action.source, ()) if f.passed)",
    ),
    Mutant(
        "a copy that failed counts as done",
        COPYING,
        "            if operation.error is None or not hears_errors:\n",
        "            if True:\n",
    ),
    Mutant(
        "a state whose private copy failed may go",
        COPYING,
        "        if message.error is None:  # else the state is needed once more\n",
        "        if True:\n",
    ),
    Mutant(
        "a copy that failed is never acknowledged",
        TRANSFER,
        "        if self._domain.stopped is None:\n            self._domain.send(",
        "        if self._domain.stopped is None and error is None:\n"
        "            self._domain.send(",
    ),
    Mutant(
        "the boundary's state is given up when its copy is asked for",
        COPYING,
        "            copy = CopyState(operation.number, source, message.target)\n"
        "        self._start(",
        "            copy = CopyState(operation.number, source, message.target)\n"
        "            self._release_state(lease)\n"
        "        self._start(",
    ),
    # -- the tree and its actor
    Mutant(
        "a released lease wakes nobody",
        ACTOR,
        "        if self._ledger.waiting:\n            assert self._allocator is not None",
        "        if False:\n            assert self._allocator is not None",
    ),
    Mutant(
        "actions are carried out in reverse",
        ACTOR,
        "        for action in actions:\n            kind",
        "        for action in reversed(actions):\n            kind",
    ),
    Mutant(
        "the writers of an adopted state are not told",
        ACTOR,
        "            if after:\n                assert self._transfer is not None",
        "            if False:\n                assert self._transfer is not None",
    ),
    Mutant(
        "duplicates are not given back",
        TREE,
        "        if taken and swap:\n",
        "        if taken and not swap:\n",
    ),
    Mutant(
        "the page table is rewritten but for one page",
        TREE,
        "            changed.append(PagesChanged(offset // TOKEN_BYTES, child.pages))",
        "            changed.append(PagesChanged(offset // TOKEN_BYTES, child.pages[:-1]))",
    ),
    Mutant(
        "a state is put where one is",
        TREE,
        "if node.state != NO_SLOT or not arrived",
        "if node.state == -1 or not arrived",
    ),
    Mutant(
        "a lease of a former generation is accepted",
        TREE_CORE,
        "        if lease.generation != self.generation:\n            raise StaleHandle(",
        "        if lease.generation == -1:\n            raise StaleHandle(",
        ("reset",),
    ),
    Mutant(
        "a split leaves the upper part unprotected",
        RADIX,
        "            upper.protected_children = 1",
        "            upper.protected_children = 0",
    ),
    Mutant(
        "a merge joins pages the wrong way round",
        RADIX,
        "        child.page_ids = node.page_ids + child.page_ids",
        "        child.page_ids = child.page_ids + node.page_ids",
    ),
    Mutant(
        "protection does not reach the parent",
        LEASES,
        "            parent.protected_children += 1\n            node = parent\n",
        "            break\n",
    ),
    Mutant(
        "leased KV may go",
        COMPONENTS,
        "        and not node.leases\n",
        "        and node.leases >= 0\n",
    ),
    Mutant(
        "a leased state may go",
        COMPONENTS,
        "        and not node.state_leases\n",
        "        and node.state_leases >= 0\n",
    ),
    Mutant(
        "a state part that ends frees the whole path",
        LEASES,
        "        anchor.state_leases -= 1\n",
        "        anchor.state_leases = 0\n",
    ),
    # -- the host tier
    Mutant(
        "a backup does not wait for the steps that write",
        TRANSFER,
        "        after = tuple(self._writing)\n",
        "        after = ()\n",
        ("host",),
    ),
    Mutant(
        "a copy between the tiers that failed counts as done",
        TIERING,
        "self._tree.copied(message.op, error is None, pages_ok=rows_ok)",
        "self._tree.copied(message.op, True, pages_ok=rows_ok)",
        ("host",),
    ),
    Mutant(
        "what a backup reads is not protected",
        LOADING,
        "if not source.leaving and not source.state_leaving:",
        "if source.leaving and not source.state_leaving:",
        ("host",),
    ),
    Mutant(
        "nothing protects what is read when the tier is closed",
        LOADING,
        '                elif operation.phase == "submitted":',
        '                elif operation.phase == "never":',
        ("host",),
    ),
    Mutant(
        "a match counts what a closed tier has",
        TREE_CORE,
        "            if self.host_closed:\n",
        "            if False:\n",
        ("host",),
    ),
    Mutant(
        "pages leave before they are copied",
        SHEDDING,
        "if part.leaving and not part.leaving_children and not self._lacks_copy(node):",
        "if part.leaving and not part.leaving_children:",
        ("host",),
    ),
    Mutant(
        "a reset frees what backups read",
        SHEDDING,
        "            if reads:\n                self._keep_source(operation)",
        "            if not reads:\n                self._keep_source(operation)",
        ("host", "reset"),
    ),
    Mutant(
        "a load of a former generation is published",
        SHEDDING,
        "            operation.pieces.clear()\n            operation.state_node = None\n",
        "",
        ("host", "reset"),
    ),
    Mutant(
        "a load is published before the one that it requires",
        LOADING,
        "waits = operation.requires in self.operations.live and (ok or good_pages > 0)",
        "waits = operation.requires in self.operations.live and good_pages > 0 and not ok",
        ("host",),
    ),
    Mutant(
        "a split of a node moves the pages of its copy",
        OPERATIONS,
        "pieces[node.id] = Piece(node, first + pages, count - pages)",
        "pieces[node.id] = Piece(node, first, count - pages)",
        ("host",),
    ),
    Mutant(
        "a place for a state is lost when its copy fails",
        BACKING,
        "        if operation.slot != NO_SLOT:\n            actions.append(free(",
        "        if operation.slot == -1:\n            actions.append(free(",
        ("host",),
    ),
    Mutant(
        "room that came too late is lost",
        LOADING,
        "            if pages:\n                back.append(",
        "            if not pages:\n                back.append(",
        ("host",),
    ),
    Mutant(
        "who waits for a load is not woken",
        TIERING,
        "        if lease is not None and lease.load:\n            return",
        "        if lease is not None and lease.live:\n            return",
        ("host",),
    ),
    Mutant(
        "a request believes a load that failed",
        ARRIVING,
        "        if boundary < self.computed:\n",
        "        if boundary < -1:\n",
        ("host",),
    ),
    Mutant(
        "reservations of the host overtake",
        HOST_ALLOCATOR,
        "        elif not self._asking and self._fits(action):",
        "        elif self._fits(action):",
        ("host",),
    ),
    Mutant(
        "host pages that are the only copy may go",
        HOST,
        "        and not part.pins\n",
        "        and part.pins >= 0\n",
        ("host",),
    ),
    Mutant(
        "who uses what is leaving does not keep it",
        HOST,
        "            self.stay(node)\n        else:\n            self._pin(node)",
        "            pass\n        else:\n            self._pin(node)",
        ("host",),
    ),
    # -- requests
    Mutant(
        "more is published than was computed",
        STANDING,
        "return min(self.computed, self._key.length)",
        "return min(self.room, self._key.length)",
    ),
    Mutant(
        "the page table is not rewritten",
        HOLDING,
        "            self.pages[at : at + len(change.pages)] = change.pages",
        "            pass",
    ),
    Mutant(
        "pages that an advance replaced are lost",
        HOLDING,
        '        self.give_back(replaced, array("i"), (), spans)',
        "        replaced = replaced[:0]",
    ),
    Mutant(
        "an aborted request forgets its working state",
        HOLDING,
        "            states.append(self.working)",
        "            pass",
    ),
    Mutant(
        "an aborted checkpoint forgets its copy",
        HOLDING,
        "            states.append(self.copying)",
        "            pass",
    ),
    Mutant(
        "an ended request drops its fences",
        STANDING,
        "        self._holding.give_back(pages, states, fences, self._holding.own_spans)\n",
        "        self._holding.give_back(pages, states, (), self._holding.own_spans)\n",
    ),
    Mutant(
        "an ended request's lease goes before its steps",
        STANDING,
        "core.release_lease_after(self._lease, fences)",
        "core.release_lease_after(self._lease, ())",
    ),
    Mutant(
        "a suspended request drops its fences",
        REQUEST,
        "        self._holding.give_back(pages, states, fences, self._holding.own_spans)\n",
        "        self._holding.give_back(pages, states, (), self._holding.own_spans)\n",
        ("suspend",),
    ),
    Mutant(
        "rejected drafts stay in the key",
        REQUEST,
        "        self._key = self._key.cut(position)\n",
        "        pass\n",
        ("drafts",),
    ),
    Mutant(
        "rejected drafts count as computed",
        REQUEST,
        "        self.computed = min(self.computed, position)\n",
        "        pass\n",
        ("drafts",),
    ),
    Mutant(
        "a pass on data that did not arrive counts as computed",
        ARRIVING,
        "        self.computed = promised\n",
        "        pass\n",
        ("early",),
    ),
    Mutant(
        "a pass does not wait for what it runs on",
        ARRIVING,
        "            named.wait(fence)\n",
        "            pass\n",
        ("early",),
    ),
    Mutant(
        "one page of a window too many is given back",
        HOLDING,
        "            end = min(span.needs_from(boundary) // self._page_size, len(table))\n",
        "            end = min(span.needs_from(boundary) // self._page_size + 1, len(table))\n",
        ("windows",),
    ),
    Mutant(
        "an abandoned pass counts as computed",
        REQUEST,
        "            self.computed = start\n        self._state_at = None",
        "            pass\n        self._state_at = self.computed",
        ("abandon",),
    ),
    Mutant(
        "a grant that nobody heard of is kept",
        CORE,
        "if not self.stopped and not nothing:",
        "if self.stopped:",
    ),
)

# Harmless in almost every run: each with the test that kills it, and why runs hardly do.
KILLED_BY: tuple[tuple[Mutant, str], ...] = (
    (
        Mutant(
            "who left while it was queued is still served",
            DOMAIN,
            "            if undo is not None:\n                reply.abandoned = True",
            "            if undo is not None:\n                reply.abandoned = False",
        ),
        "tests/actors/test_domain.py"
        "::test_a_message_whose_caller_left_while_it_was_queued_is_not_handled",
    ),
    (
        # The next turn of anybody lets the others in.
        Mutant(
            "what a cancelled caller was let in for is lost",
            DOMAIN,
            "self._admit()  # the room given to this caller goes to the next one",
            "pass",
            ("narrow", "cancel"),
        ),
        "tests/actors/test_domain.py::test_f105_a_caller_cancelled_after_it_was_let_in_passes_the_room_on",
    ),
    (
        # There must be just enough that can go beside what stays.
        Mutant(
            "who waits for what is kept now is not told",
            TIERING,
            "            host.stayed = False\n            self._let_waiters_retry()",
            "            host.stayed = False",
            ("host",),
        ),
        "tests/sim/test_found.py::test_room_that_was_promised_and_is_kept_by_a_lease_is_looked_for_elsewhere",
    ),
    (
        # Nearly all reservations are answered before anything else happens.
        Mutant(
            "what is planned when the tier is closed is copied",
            LOADING,
            '                if operation.phase == "planned":',
            '                if operation.phase == "never":',
            ("host",),
        ),
        "tests/tree/test_closed_tier.py::test_copies_that_are_only_planned_are_not_made",
    ),
    (
        # The pages that its last pass reads must be given to another at once.
        Mutant(
            "a suspended request's lease goes before its steps",
            REQUEST,
            "core.release_lease_after(self._lease, fences)",
            "core.release_lease_after(self._lease, ())",
            ("suspend",),
        ),
        "tests/runtime/test_suspend.py::test_what_a_pass_still_reads_under_the_lease_is_not_evicted",
    ),
)


HUNT = """
import json, sys, torch
torch.set_num_threads(1)
from phloem.runtime.simulation.campaign import plan_for, run_plan
found, needs = [], set(json.loads(sys.argv[3]))
for start in json.loads(sys.argv[1]):
    for number in range(int(sys.argv[2])):
        plan = plan_for(start + number)
        there = {*plan.uses, *plan.faults.on, *(("host",) if plan.config.host_bytes else ())}
        if not needs <= there:
            continue
        try:
            run_plan(plan)
        except Exception as error:
            cause = getattr(error, "error", error)
            found.append([number + 1, f"{type(cause).__name__}: {str(cause).splitlines()[0]}"])
            break
    else:
        found.append(None)
        break
print("FOUND" + json.dumps(found))
"""


@dataclass
class Found:
    """After how many seeds each start failed, None for never; and what the first one said."""

    mutant: Mutant
    seeds: list[int | None]
    how: str


@contextmanager
def mutated(mutant: Mutant) -> Generator[str, None, None]:
    """A folder with a copy of the package that has the mutant in it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "phloem"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / mutant.file
        text = file.read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.name}: its line is not in {mutant.file} once"
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        yield folder


def is_killed(mutant: Mutant, killer: str) -> bool:
    """Whether a test fails with the mutant, and not for another reason."""
    with mutated(mutant) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", killer],
            env={**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=PACKAGE.parents[1],
            capture_output=True,
            check=False,
        )
    return done.returncode == 1  # anything else: it did not run


def hunt(mutant: Mutant, starts: tuple[int, ...] = STARTS, seeds_max: int = SEEDS_MAX) -> Found:
    """Look for one mutant, from each start until it is found."""
    with mutated(mutant) as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                HUNT,
                json.dumps(starts),
                str(seeds_max),
                json.dumps(mutant.needs),
            ],
            env={"PYTHONPATH": folder, "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    _, mark, answer = done.stdout.rpartition("FOUND")
    if not mark:
        raise RuntimeError(f"{mutant.name}: {done.stderr[-2000:]}")
    found = json.loads(answer)
    seeds = [entry and entry[0] for entry in found]
    return Found(mutant, seeds, next((entry[1] for entry in found if entry), "not found"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--starts", type=int, default=len(STARTS))
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, help="at most, for each start")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    escaped = 0
    print(f"{'mutant':58} {'median':>6} {'most':>6}  found as")
    with ThreadPoolExecutor(options.jobs) as pool:
        searches = [
            pool.submit(hunt, mutant, STARTS[: options.starts], options.seeds) for mutant in chosen
        ]
        for search in searches:
            found = search.result()
            seeds = [count for count in found.seeds if count is not None]
            if len(seeds) < len(found.seeds):
                escaped += 1
                print(f"{found.mutant.name:58} {'-':>6} {'-':>6}  escaped", flush=True)
                continue
            median = int(statistics.median(seeds))
            print(f"{found.mutant.name:58} {median:6} {max(seeds):6}  {found.how[:90]}", flush=True)
    print(f"{len(chosen) - escaped} of {len(chosen)} mutants found")
    for mutant, killer in KILLED_BY:
        if options.only in mutant.name and not is_killed(mutant, killer):
            escaped += 1
            print(f"{mutant.name:58} not killed by {killer}", flush=True)
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
