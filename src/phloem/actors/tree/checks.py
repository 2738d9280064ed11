"""How an audit says what is wrong."""

from __future__ import annotations

__all__ = ["AuditFailed", "check"]


class AuditFailed(AssertionError):
    """What the tree keeps and what its structure says differ. Always a bug of the tree."""


def check(holds: bool, otherwise: str) -> None:
    """Raise `AuditFailed` unless it holds."""
    if not holds:
        raise AuditFailed(otherwise)
