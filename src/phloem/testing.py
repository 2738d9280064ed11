"""Tools to test a scheduler that uses the cache: see `phloem.runtime.simulation`."""

from phloem.runtime.simulation import (
    FAULTS,
    ORDERS,
    POLICIES,
    PRODUCTION_FAULTS,
    QWEN3_NEXT_80B,
    WORKLOADS,
    Chunk,
    CostModel,
    Draws,
    EventLog,
    Faults,
    Fixed,
    InjectedFault,
    Limits,
    NotDeterministic,
    Outcome,
    Plan,
    Policy,
    Preempted,
    Prompt,
    Scale,
    Served,
    Server,
    SimDeadlock,
    SimLivelock,
    SimLoop,
    SimModel,
    Simulation,
    SimulationFailed,
    TaggedTokens,
    Violation,
    Watch,
    check_determinism,
    explore,
    of_trace,
    plan_for,
    play,
    production,
    run_plan,
    shorten,
    sim_layout,
    sim_run,
    simulate,
    swarm,
    workload,
)

__all__ = [
    # the loop
    "SimLoop", "Policy", "POLICIES", "SimDeadlock", "SimLivelock", "sim_run",
    # scenarios
    "Simulation", "simulate", "explore", "Outcome", "SimulationFailed",
    "check_determinism", "NotDeterministic", "Draws",
    # faults and checkers
    "Faults", "FAULTS", "swarm", "InjectedFault", "Watch", "EventLog", "Violation",
    # models and schedulers
    "SimModel", "Chunk", "CostModel", "QWEN3_NEXT_80B", "TaggedTokens", "sim_layout",
    "Server", "Limits", "Served", "Preempted", "ORDERS",
    # workloads
    "Prompt", "Scale", "WORKLOADS", "workload", "of_trace",
    # many seeds, whole traces
    "Plan", "Fixed", "plan_for", "play", "run_plan", "shorten", "production", "PRODUCTION_FAULTS",
]  # fmt: skip
