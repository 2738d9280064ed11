"""`python -m benchmarks`: what phloem costs, beside its floors. See `--help`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import copies, events, evictions, matching, operations, scale, serving

SECTIONS = (
    "nodes",
    "tokens",
    "matching",
    "hops",
    "leaves",
    "deep",
    "policies",
    "events",
    "copies",
    "first_token",
    "serving",
)
_OPERATIONS = ("match", "lease", "insert", "evict")


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _print_costs(title: str, costs: operations.Costs) -> None:
    print(f"\n{title}")
    heads = "".join(f"{f'{name} p50':>13}{'p99':>9}" for name in _OPERATIONS)
    print(f"  {'µs':16}{heads}")
    for form, by_operation in costs.items():
        cells = "".join(
            f"{by_operation[name]['p50_us']:13.1f}{by_operation[name]['p99_us']:9.1f}"
            for name in _OPERATIONS
        )
        print(f"  {form:16}{cells}")


def _by_nodes(results: dict[str, Any]) -> None:
    for nodes in (1_000, 10_000, 100_000):
        _tell(f"a tree of {nodes:,} nodes")
        costs = results[f"nodes_{nodes}"] = operations.by_size(nodes, _tell)
        _print_costs(
            f"{nodes:,} nodes, prompts of 1,280 tokens (lease: acquire and release)", costs
        )


def _by_tokens(results: dict[str, Any]) -> None:
    for tokens in (1_024, 8_192, 32_768, 131_072):
        _tell(f"prompts of {tokens:,} tokens")
        costs = results[f"tokens_{tokens}"] = operations.by_length(tokens, _tell)
        _print_costs(f"prompts of {tokens:,} tokens, 10,000 nodes", costs)


def _by_hop(results: dict[str, Any]) -> None:
    _tell("hops")
    figures = results["hops"] = operations.hops(_tell)
    print("\nCPU µs a call, one caller and 16 at once")
    print(f"  {'':28}" + "".join(f"{f'{loop}, 1':>13}{'16':>8}" for loop in figures))
    for name in next(iter(figures.values())):
        cells = "".join(
            f"{loop[name]['1']:13.2f}{loop[name]['16']:8.2f}" for loop in figures.values()
        )
        print(f"  {name:28}{cells}")


def _by_matching(results: dict[str, Any]) -> None:
    _tell("matching, conversion included")
    figures = results["matching"] = matching.matching()
    print(f"\n{'matching, 10,000 nodes':58} {'measured':>10} {'target':>10}")
    for target in matching.TARGETS:
        value = figures[target.name]
        bound = f"{'>=' if target.at_least else '<='} {target.bound:,g}"
        met = "met" if target.met(value) else "NOT MET"
        print(f"  {target.text:56} {value:10,.1f} {bound:>10}  {met}")


def _by_leaves(results: dict[str, Any]) -> None:
    _tell("many leaves and few")
    few, many = scale.evict_by_leaves(40), scale.evict_by_leaves(40_000)
    results["leaves"] = {"40": few, "40000": many}
    print(f"\nevict one page: {few:.1f} µs with 40 leaves, {many:.1f} µs with 40,000")


def _by_depth(results: dict[str, Any]) -> None:
    rows: dict[str, dict[str, float]] = {}
    for nodes in (2_000, 20_000, 200_000):
        _tell(f"a chain of {nodes:,} nodes")
        rows[f"{nodes:,}"] = scale.deep(nodes)
    results["deep"] = rows
    print("\nµs, a chain of one-token nodes with a state each, built through one growing lease")
    print(f"  {'nodes':42}" + "".join(f"{name:>12}" for name in rows))
    for name in rows["2,000"]:
        print(f"  {name:42}" + "".join(f"{row[name]:12,.1f}" for row in rows.values()))


def _by_policies(results: dict[str, Any]) -> None:
    figures = results["policies"] = {}
    print("\nCPU µs a victim of an eviction by bytes, while conversations go on")
    print(f"  {'':12}{'10,000 nodes':>14}{'100,000 nodes':>14}")
    for policy in evictions.POLICIES:
        _tell(f"evictions under {policy}")
        row = [evictions.eviction_us(policy, nodes) for nodes in (10_000, 100_000)]
        figures[policy] = {"10000": row[0], "100000": row[1]}
        print(f"  {policy:12}{row[0]:14.1f}{row[1]:14.1f}")


def _by_events(results: dict[str, Any]) -> None:
    _tell("what events cost")
    match, written = asyncio.run(events.match_cost()), events.written_cost()
    results["events"] = {"match": match, "written": written}
    print("\nevents off, µs a match through the domain, least of many")
    print(f"  as it is {match['off']:.3f}, without their code {match['without']:.3f}")
    print(f"  more {match['more']:.3f} (target: at most 0.1)")
    print("events on, CPU µs an event, all threads")
    print(f"  JSON {written['json']:.1f} (target: at most 12), logfmt {written['logfmt']:.1f}")
    print(f"  counted for metrics {written['counted']:.1f}")


def _by_copies(results: dict[str, Any]) -> None:
    _tell("copies by worker threads")
    together, late = copies.overlap(), copies.lag()
    results["copies"] = {"overlap": together, "lag": late}
    print("\na load of 32 layers under a forward pass that takes as long; least of many")
    print(f"  {'':36} {'bytes move':>12} {'time passes':>12}")
    for name, text in (
        ("to_larger", "both to the larger alone (<= 1.15)"),
        ("to_closed_form", "to what the landings allow"),
        ("wait_us_a_layer", "waiting beyond that, µs a layer"),
        ("load_ms", "load alone, ms"),
    ):
        row = "".join(f" {together[kind][name]:12.2f}" for kind in ("bytes", "sleeping"))
        print(f"  {text:36}{row}")
    print(f"  {'GB/s':36} {together['bytes']['load_gb_s']:12.2f}")
    print("loop lag p99, ms, in the best turn and in the middle one")
    for name, text in (
        ("busy", "while 1 GiB moves (at most 5)"),
        ("process", "while another process copies"),
        ("quiet", "while nothing is copied"),
    ):
        best, middle = late[f"{name}_p99_ms"], late[f"{name}_p99_ms_p50"]
        print(f"  {text:36} {best:12.2f} {middle:12.2f}")


def _by_first_token(results: dict[str, Any]) -> None:
    _tell("the first token of a prompt that is on the host")
    figures = results["first_token"] = serving.first_token()
    print("\ntime to first token, ms, 2,048 tokens known; a load that takes as long as the pass")
    for name, text in (
        ("device_ms", "all on the device"),
        ("whole_ms", "loaded, and then computed"),
        ("by_layer_ms", "each layer computed when it is there"),
    ):
        print(f"  {text:36} {figures[name]:8.1f}")


def _by_serving(results: dict[str, Any]) -> None:
    _tell("16 requests at once through a hybrid model, with the cache and without")
    figures = results["serving"] = serving.serving()
    print("\n16 requests at once: 1,024 shared, 128 own, 16 new tokens each")
    print(f"  prompt tokens computed / distinct    {figures['computed_to_distinct']:8.2f}")
    print(f"  total time without / with the cache  {figures['speedup']:8.2f}")
    print(f"  loop lag p99, ms                     {figures['loop_lag_p99_ms']:8.2f}")


def _by_million(results: dict[str, Any]) -> None:
    rows: dict[str, dict[str, float]] = {}
    for nodes in (10_000, 100_000, 1_000_000):
        _tell(f"growing to {nodes:,} nodes of one page each")
        rows[f"{nodes:,}"] = scale.growth(nodes, _tell)
    results["growth"] = rows
    print("\ngrowth, edges of one page")
    print(f"  {'':22}" + "".join(f"{name:>12}" for name in rows))
    for name in rows["10,000"]:
        print(f"  {name:22}" + "".join(f"{row[name]:12,.1f}" for row in rows.values()))


def main() -> None:
    """Run the sections asked for, print tables, and write JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section; repeatable")
    parser.add_argument("--scale", choices=["million"], help="also grow to a million nodes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    run = {
        "nodes": _by_nodes,
        "tokens": _by_tokens,
        "matching": _by_matching,
        "hops": _by_hop,
        "leaves": _by_leaves,
        "deep": _by_depth,
        "policies": _by_policies,
        "events": _by_events,
        "copies": _by_copies,
        "first_token": _by_first_token,
        "serving": _by_serving,
    }
    sections: Sequence[str] = arguments.only or ([] if arguments.scale else SECTIONS)
    for section in sections:
        run[section](results)
    if arguments.scale:
        _by_million(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
