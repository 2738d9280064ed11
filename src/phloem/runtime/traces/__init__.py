"""Readers of real request traces, and a small sample of each that ships with the package.

    for request in sample("mooncake_conversation"):
        request.at_s, request.tokens(), request.output

`data/README.md` says where the samples come from and under which licences.
"""

from phloem.runtime.traces.event_logs import read_event_log
from phloem.runtime.traces.readers import (
    Sessions,
    read_agent_tokens,
    read_azure,
    read_mooncake,
    read_sessions,
    read_token_log,
    read_trace,
)
from phloem.runtime.traces.request import TraceRequest
from phloem.runtime.traces.samples import SAMPLES, sample

__all__ = [
    "TraceRequest", "read_trace",
    "read_mooncake", "read_sessions", "Sessions", "read_agent_tokens", "read_token_log",
    "read_azure", "read_event_log",
    "SAMPLES", "sample",
]  # fmt: skip
