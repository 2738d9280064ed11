"""Every token of a prompt is reused or lost for a reason, for every request of a run."""

from __future__ import annotations

from phloem.events import Acquired, Event, FellBack, RequestEnded, RequestForked, RequestOpened
from phloem.runtime.simulation.model import Violation

__all__ = ["Reasons"]


class Reasons:
    """A listener of events that adds up; raises `Violation` where something is left over."""

    def __init__(self) -> None:
        self.lookups = 0
        self.lost: dict[str, int] = {}  # tokens, by reason
        self._stands: dict[str, int] = {}  # tokens that each request reuses as far as it is known

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        match event:
            case RequestOpened() | Acquired():
                self._looked_up(event)
            case RequestForked():
                self._stands[event.request] = 0
            case FellBack():
                self._fell_back(event)
            case RequestEnded():
                stands = self._stands.pop(event.request, 0)
                if event.reused < stands:
                    raise Violation(f"{event.request!r} stood on {stands} tokens: {event}")
                if event.loaded > event.reused:
                    raise Violation(f"more was loaded than was reused: {event}")
            case _:
                pass

    def _looked_up(self, event: RequestOpened | Acquired) -> None:
        self.lookups += 1
        device = event.usable if event.device is None else event.device
        if event.usable + sum(event.lost.values()) != event.tokens:
            raise Violation(f"the reasons do not add up: {event}")
        if min(event.lost.values(), default=1) < 1 or not 0 <= device <= event.usable:
            raise Violation(f"figures that cannot be: {event}")
        self._count(event.lost)
        if isinstance(event, RequestOpened):
            self._stands[event.request] = event.usable

    def _fell_back(self, event: FellBack) -> None:
        gone = sum(event.lost.values())
        stands = self._stands.get(event.request)
        if stands is not None:
            if not 0 < gone <= stands or stands - gone != event.boundary:
                raise Violation(f"it stood on {stands} tokens: {event}")
            self._stands[event.request] = event.boundary
        self._count(event.lost)

    def _count(self, lost: dict[str, int]) -> None:
        for why, tokens in lost.items():
            self.lost[why] = self.lost.get(why, 0) + tokens
