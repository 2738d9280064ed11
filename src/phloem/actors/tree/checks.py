"""How an audit says what is wrong."""

from __future__ import annotations

__all__ = ["AuditFailed", "check"]


class AuditFailed(AssertionError):
    """A figure that the tree keeps is not what its structure says. Always a bug of the tree."""


def check(holds: bool, otherwise: str) -> None:
    """Raise `AuditFailed` unless it holds."""
    if not holds:
        raise AuditFailed(otherwise)
