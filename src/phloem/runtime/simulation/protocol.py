"""Actions and acknowledgements, held against what was promised about them.

* What turns send is handled in the order in which it was sent, and turns never nest.
* Each action is carried out once. The cap of a path comes after the duplicates of its insert, and
  after everything else that the insert gives back.
* Each copy is asked for once, and acknowledged once, when it has ended.
* Each reservation is answered once, before the domain rests; on the device it may also stand in
  line for what is leaving, and those of the host tier are granted in order.
* The tree is asked for room by one allocation at a time, in each tier.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from phloem.actors import messages as m
from phloem.actors.actions import (
    BackupToHost,
    ClearState,
    CopyState,
    EvictExcessPathStates,
    FreeDeviceSlots,
    FreeHostSlots,
    LoadToDevice,
    Places,
    Reserve,
    Tier,
)
from phloem.errors import CopyFailed
from phloem.runtime.core import Core
from phloem.runtime.simulation.model import Violation
from phloem.runtime.simulation.places import Places as Ownership

__all__ = ["Protocol"]

_CARRIED_OUT: dict[type, tuple[str, ...]] = {
    FreeDeviceSlots: ("allocator",),
    FreeHostSlots: ("host allocator",),
    EvictExcessPathStates: ("tree",),
    Reserve: ("allocator", "host allocator"),
    BackupToHost: ("transfer",),
    LoadToDevice: ("transfer",),
}


class Protocol:
    """Watches the messages of one runtime; `turns` counts those handled, by actor and kind."""

    def __init__(self, places: Ownership) -> None:
        self.turns: Counter[str] = Counter()
        self._places = places
        self._busy = ""
        self._cause = 0
        self._inserts: deque[int] = deque()  # turns of inserts whose messages may still come
        self._capped_by = -1  # the last of them that applied the cap of states
        self._copies: set[int] = set()  # asked for and not acknowledged
        self._loading: dict[int, Sequence[int]] = {}  # of those, the pages that loads bring
        self._reserving: dict[Tier, list[int]] = {"device": [], "host": []}
        self._asking: Counter[Tier] = Counter()
        self._refused = 0  # backups, for want of room on the host
        self._refused_before: dict[str, int] = {}  # the tree was last asked for room, by for whom

    def begin(self, what: str, message: object, core: Core) -> None:
        """A turn begins."""
        self.turns[what] += 1
        if self._busy:
            raise Violation(f"turns nest: {what} inside {self._busy}")
        self._busy = what
        domain = core.domain
        cause = domain.cause
        if cause:
            if cause < self._cause:
                raise Violation(f"{what}, sent by turn {cause}, comes after one of {self._cause}")
            if cause >= domain.turns:
                raise Violation(f"turn {domain.turns}, {what}, was sent by turn {cause}")
            self._cause = cause
            while self._inserts and self._inserts[0] < cause:
                self._inserts.popleft()
        if isinstance(message, m.Insert):
            self._inserts.append(domain.turns)
        self._check(message, cause)

    def end(self) -> None:
        """The turn is over."""
        self._busy = ""

    def backup_refused(self, owner: str) -> bool:
        """Whether any was, for want of room on the host, since the tree was asked for `owner`."""
        return self._refused > self._refused_before.get(owner, self._refused)

    def left(self, owner: str) -> None:
        """`owner` is over: nothing about it is kept."""
        self._refused_before.pop(owner, None)

    def _check(self, message: object, cause: int) -> None:
        match message:
            case EvictExcessPathStates() if cause in self._inserts:
                self._capped_by = cause
            case FreeDeviceSlots() if cause == self._capped_by:
                raise Violation(f"places of insert {cause} are freed after its cap was applied")
            case CopyState() | ClearState():
                self._copy_asked(message.op)
            case m.CopyAfter():
                self._copy_asked(message.action.op)
            case BackupToHost() | LoadToDevice():
                self._copy_asked(message.op)
                self._tell_places(message)
            case m.Copied():
                if message.op not in self._copies:
                    raise Violation(f"copy {message.op} is acknowledged and was not asked for")
                self._copies.remove(message.op)
                targets = self._loading.pop(message.op, ())
                if isinstance(message.error, CopyFailed):
                    self._places.copy_spared(message.op, targets[: message.error.rows_ok])
            case Reserve():
                self._reserving[message.tier].append(message.op)
            case m.Reserved() | m.NotReserved():
                self._answered(message.op, granted=isinstance(message, m.Reserved))
            case m.MakeRoom():
                self._refused_before[message.owner] = self._refused
                if message.tell:
                    self._asked("device")
            case m.MakeHostRoom():
                self._asked("host")
            case m.MadeRoom():
                self._made("device")
            case m.MadeHostRoom():
                self._made("host")
            case _:
                pass

    def _copy_asked(self, op: int) -> None:
        if op in self._copies:
            raise Violation(f"copy {op} is asked for twice")
        self._copies.add(op)

    def _tell_places(self, action: BackupToHost | LoadToDevice) -> None:
        on_host: dict[str, list[int]] = {"kv": [], "state": []}
        for part in action.items:
            on_host[part.component].extend(_host_side(part, isinstance(action, BackupToHost)))
            if part.component == "kv" and isinstance(action, LoadToDevice):
                self._loading[action.op] = part.targets
        self._places.copies_between(action.op, on_host["kv"], on_host["state"])

    def _answered(self, op: int, *, granted: bool) -> None:
        on_host, on_device = self._reserving["host"], self._reserving["device"]
        if op in on_device:
            on_device.remove(op)
            self.left(f"op {op}")
        elif op in on_host and (on_host[0] == op or not granted):  # too much is refused at once
            on_host.remove(op)
            self._refused += not granted
        else:
            raise Violation(f"reservation {op} is answered; those of the host wait as {on_host}")

    def _asked(self, tier: Tier) -> None:
        self._asking[tier] += 1
        if self._asking[tier] != 1:
            raise Violation(f"the tree is asked twice at once for room on the {tier}")

    def _made(self, tier: Tier) -> None:
        self._asking[tier] -= 1
        if self._asking[tier]:
            raise Violation(f"an answer about room on the {tier} that nobody asked for")

    def at_rest(self, core: Core) -> None:
        """Nothing is queued: everything sent has been handled."""
        in_line = {message.owner for message in core.allocator.queue()}
        late = [op for op in self._reserving["device"] if f"op {op}" not in in_line]
        if late or self._reserving["host"]:
            raise Violation(
                f"reservations {late} on the device, {self._reserving['host']} on the host were "
                "not answered"
            )
        copying = set(core.tree_actor.operations)
        copying.update(
            operation.number
            for operation in core.tree.operations
            if operation.phase == "submitted" and operation.outcome is None
        )
        if copying != self._copies:
            raise Violation(
                f"copies {sorted(self._copies)} are not acknowledged, the tree knows "
                f"{sorted(copying)}"
            )
        for kind, actors in _CARRIED_OUT.items():
            emitted = core.tree_actor.counts.get(kind.__name__, 0)
            handled = sum(self.turns[f"{actor} {kind.__name__}"] for actor in actors)
            if emitted != handled:
                raise Violation(f"{emitted} {kind.__name__} were emitted, {handled} carried out")


def _host_side(part: Places, backup: bool) -> list[int]:
    return (part.targets if backup else part.sources).tolist()
