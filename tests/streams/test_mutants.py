"""Hand-made mutants of the engines, each with the test that kills it.

A suite that passes with a broken engine proves nothing. The list is checked against the sources at
every run; the mutants themselves are run with PHLOEM_FUZZ set (a few seconds each).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "phloem"


class Mutant(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    killer: str


MUTANTS = [
    Mutant(
        "`after` is ignored", "dispatch.py",
        "named = (*batch.after, *batch.requires)", "named = (*batch.requires,)",
        "test_engines.py::TestOrder::test_after_orders_and_requires_needs",
    ),
    Mutant(
        "`requires` does not order", "dispatch.py",
        "named = (*batch.after, *batch.requires)", "named = (*batch.after,)",
        "test_engines.py::TestOrder::test_after_orders_and_requires_needs",
    ),
    Mutant(
        "a failure does not spread", "dispatch.py",
        "if needed.error is not None:", "if needed.error is self:",
        "test_engines.py::TestOrder::test_a_failure_spreads_by_requires_only",
    ),
    Mutant(
        "bytes in flight leak", "dispatch.py",
        "self._inflight[ticket.batch.channel] -= ticket.batch.nbytes", "pass",
        "test_engines.py::TestWaiting::test_done_means_quiet",
    ),
    Mutant(
        "a cancelled ticket ends before what it waits for", "dispatch.py",
        "if self._dead is None and not self._closed:", "if False:",
        "test_device.py::test_cancelled_before_its_launch_it_ends_after_what_it_waits_for",
    ),
    Mutant(
        "a dead engine takes batches", "dispatch.py",
        "if self._dead is not None:\n                raise", "if False:\n                raise",
        "test_engines.py::TestEnds::test_a_dead_engine_fails_everything_and_hangs_nothing",
    ),
    Mutant(
        "age before priority", "dispatch.py",
        "key = (ticket.priority, ticket.seq)", "key = (0, ticket.seq)",
        "test_engines.py::TestOrder::test_priority_then_age_among_the_ready",
    ),
    Mutant(
        "a copy for which somebody waits stays behind", "dispatch.py",
        "ticket.priority = min(0, ticket.priority)", "pass",
        "test_engines.py::TestOrder::test_priority_then_age_among_the_ready",
    ),
    Mutant(
        "ranks do not hear for what somebody waits", "ranks.py",
        "if ticket.seq in self._joints and ticket.batch.priority > 0:", "if False:",
        "test_ranks.py::test_every_rank_hears_for_which_copy_somebody_waits",
    ),
    Mutant(
        "waiters before the outcome", "engine.py",
        "assert not self.done", "self.quiesced.mark_passed()\n        assert self",
        "test_engines.py::TestWaiting::test_done_means_quiet",
    ),
    Mutant(
        "a cancelled waiter takes the copy along", "engine.py",
        "if waiter in self._waiters:", "self.cancel()\n            if waiter in self._waiters:",
        "test_engines.py::TestWaiting::test_a_cancelled_waiter_leaves_copy_and_others",
    ),
    Mutant(
        "those who wait for a layer are left when the copy ends early", "engine.py",
        "for fence in fences.values():", "for fence in ():",
        "test_engines.py::TestCancel::test_running_ends_at_a_layer_boundary",
    ),
    Mutant(
        "progress runs a layer ahead", "threads.py",
        "ticket.progress(layer + 1)", "ticket.progress(layer + 2)",
        "test_engines.py::TestCancel::test_running_ends_at_a_layer_boundary",
    ),
    Mutant(
        "rows that a failure spares are not copied", "dispatch.py",
        "error = self.attempt(ticket, layer, lambda: copy(remains.items))", "error = None",
        "test_engines.py::TestWhatAFailureSpares::test_they_are_copied_to_the_end",
    ),
    Mutant(
        "more rows are said to be good than a later failure spares", "remains.py",
        "rows = min(error.rows_ok, len(first.target_ids))", "rows = error.rows_ok",
        "test_engines.py::TestWhatAFailureSpares::test_failures_add_up",
    ),
    Mutant(
        "a layer that is not whole counts as landed", "threads.py",
        "if batch.by_layer and remains.error is None:", "if batch.by_layer:",
        "test_engines.py::TestWhatAFailureSpares::test_they_are_copied_to_the_end",
    ),
    Mutant(
        "rows are good that are good on one rank", "ranks.py",
        "rows_ok = min(one.rows_ok for one in said)", "rows_ok = worst.rows_ok",
        "test_ranks.py::test_rows_are_good_that_are_good_on_all_ranks",
    ),
    Mutant(
        "a pass waits for a load that was given up", "landing.py",
        "stream.hold(fence, unless=self._given_up)", "stream.hold(fence)",
        "../runtime/test_overlap.py::test_a_pass_does_not_wait_for_what_nobody_wants",
    ),
    Mutant(
        "staged rows go to the source's places", "mover.py",
        "target.index_copy_(0, target_index[chunk], held)",
        "target.index_copy_(0, source_index[chunk], held)",
        "test_engines.py::TestBytes::test_all_channels_and_kinds",
    ),
    Mutant(
        "rows are scattered from one stretch to the places of another", "mover.py",
        "row = item.source_ids[at]", "row = item.source_ids[0]",
        "test_engines.py::TestBytes::test_all_channels_and_kinds",
    ),
    Mutant(
        "rows are gathered for one stretch into another", "mover.py",
        "row = item.target_ids[at]", "row = item.target_ids[0]",
        "test_engines.py::TestBytes::test_all_channels_and_kinds",
    ),
    Mutant(
        "runs join where only one side goes on", "batches.py",
        "(source, target, source | target)", "(source, target, source)",
        "test_batches.py::test_coalescing_rebuilds_the_same_pairs_in_the_fewest_runs",
    ),
    Mutant(
        "a step is over at its end, whatever its stream still runs", "fences.py",
        "if recorded is None:", "if recorded is not self:",
        "test_fences.py::TestStepTicket::test_needs_both_the_end_and_the_stream",
    ),
    Mutant(
        "a stream that runs something looks idle", "workers.py",
        "if not self._busy and not self._queue:", "if not self._queue:",
        "test_worker_stream.py::test_a_cancelled_caller_leaves_the_function_running",
    ),
    Mutant(
        "a device's copy does not wait for the events before it", "device.py",
        "self._driver.wait_event(stream, event)", "pass",
        "test_device.py::test_a_stream_goes_no_further_before_the_event_it_waits_for",
    ),
    Mutant(
        "bulk has no window", "device.py",
        "return len(on_stream) >= most\n", "return False\n",
        "test_device.py::test_f103_bulk_goes_through_a_window_and_urgent_past_it",
    ),
    Mutant(
        "a worker's event is recorded before its launches", "device_streams.py",
        "self._enqueue(lambda: self._mark(fence), lambda: self._mark(fence))", "self._mark(fence)",
        "test_device_streams.py::test_f074_a_step_is_over_after_launches_that_are_still_to_come",
    ),
    Mutant(
        "a step of a worker is never recorded", "fences.py",
        "recorded.add_recorded_hook(lambda: self._same_event(recorded))", "pass",
        "test_device_streams.py::test_f074_a_step_is_over_after_launches_that_are_still_to_come",
    ),
    Mutant(
        "a worker may begin before what was on the device", "device_streams.py",
        "driver.check_stream(stream)\n        driver.settle()", "driver.check_stream(stream)",
        "test_device_streams.py::test_what_was_on_the_device_before_has_ended",
    ),
    Mutant(
        "a worker of the CPU is taken for a device's", "device_streams.py",
        "if isinstance(stream, WorkerStream):", "if stream is self:",
        "test_device_streams.py::"
        "TestNamedStreams::test_f075_on_a_device_a_stream_of_it_must_be_named",
    ),
    Mutant(
        "pinned memory is given back while it is pinned", "host.py",
        "self._undo.append(undo)", "undo.detach()",
        "test_host_memory.py::"
        "test_what_nobody_holds_is_unpinned_before_its_address_is_given_out_again",
    ),
    Mutant(
        "copies cross registered pieces", "device_mover.py",
        "| (array[1:] % piece_rows == 0)", "",
        "test_device.py::test_runs_end_at_pieces",
    ),
    Mutant(
        "targets are not poisoned", "hazards.py",
        "rows[list(item.target_ids)] = _poison(rows.shape[1])", "pass",
        "test_virtual.py::TestHazards::test_an_early_read_is_loud",
    ),
    Mutant(
        "virtual order is never fuzzed", "virtual.py",
        "if self._rng is None:", "if self is not None:",
        "test_virtual.py::TestRepeatability::test_order_is_fuzzed_within_what_was_asked",
    ),
    Mutant(
        "a copy has ended when one rank says so", "ranks.py",
        "if len(joint.ended) == len(self._wires):", "if len(joint.ended) == 1:",
        "test_ranks.py::test_s131_a_copy_has_ended_when_the_last_rank_says_so",
    ),
    Mutant(
        "one rank's failure is outvoted", "ranks.py",
        '("done", "cancelled", "failed", "dead")', '("failed", "cancelled", "done", "dead")',
        "test_ranks.py::test_one_rank_fails_the_copy_on_all",
    ),
    Mutant(
        "a pass is over when one rank is done", "ranks.py",
        "if not ranks:\n", "if ranks is not None:\n",
        "test_ranks.py::test_what_a_lagging_rank_has_not_ended_is_not_free",
    ),
    Mutant(
        "a dead rank ends copies that wait for others", "ranks.py",
        "(fence in ours or _is_known(fence)):", "(fence is self):",
        "test_ranks.py::test_a_dead_engine_of_one_rank_ends_all_when_the_others_are_quiet",
    ),
    Mutant(
        "ranks forget what is still to be sent", "ranks.py",
        "return next(iter(self._open), self._seq), ", "return self._seq, ",
        "test_ranks.py::test_a_pass_that_arrives_late_takes_nothing_along",
    ),
    Mutant(
        "a rank does not wait for what a copy comes after", "rank.py",
        "after = tuple(self._fence_of(mark) for mark in order.after)", "after = ()",
        "test_ranks.py::test_on_each_rank_a_copy_comes_after_what_it_names",
    ),
    Mutant(
        "a batch that overtakes the orders is launched", "rank.py",
        "if made.orders > self._received:\n            raise",
        "if made is self:\n            raise",
        "test_ranks.py::test_a_pass_waits_on_each_rank_for_the_layers_there",
    ),
    Mutant(
        "every load goes onto the stream at once", "device.py",
        'return channel == "h2d" and', 'return channel == "none" and',
        "test_device.py::test_s142_at_most_three_loads_are_on_the_stream",
    ),
    Mutant(
        "a copy that waits on its stream has begun", "dispatch.py",
        "ticket.started_ns = None", "pass",
        "test_device.py::test_whether_a_copy_has_begun_is_not_guessed",
    ),
    Mutant(
        "a copy begins when its queue is not free", "dispatch.py",
        "max(ticket.started_ns, self._free_ns[channel])", "ticket.started_ns",
        "test_ranks.py::test_copies_of_one_channel_begin_one_after_the_other",
    ),
]  # fmt: skip


def run_tests(source: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly", "--timeout", "30"]
    return subprocess.run(
        [*command, *(str(ROOT / "tests" / "streams" / test) for test in tests)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_each_mutant_is_still_to_be_made(mutant: Mutant) -> None:
    text = (PACKAGE / "cuda_streams" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    name, *parts = mutant.killer.split("::")
    assert f"def {parts[-1]}(" in (ROOT / "tests" / "streams" / name).read_text()


needs_fuzz = pytest.mark.skipif(not os.environ.get("PHLOEM_FUZZ"), reason="PHLOEM_FUZZ is not set")


@pytest.mark.fuzz
@needs_fuzz
def test_without_a_mutation_the_killers_pass(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "phloem")
    done = run_tests(tmp_path, sorted({mutant.killer for mutant in MUTANTS}))
    assert done.returncode == 0, done.stdout


@pytest.mark.fuzz
@needs_fuzz
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_killed(mutant: Mutant, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "phloem")
    file = tmp_path / "phloem" / "cuda_streams" / mutant.file
    file.write_text(file.read_text().replace(mutant.old, mutant.new))
    try:
        done = run_tests(tmp_path, [mutant.killer])
    except subprocess.TimeoutExpired:
        return  # it hangs, also at its end; without the mutation it passes at once
    assert done.returncode == 1, done.stdout
    assert "1 failed" in done.stdout or " Timeout " in done.stdout, done.stdout
