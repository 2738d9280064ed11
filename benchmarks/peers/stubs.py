"""Stand-ins for packages that a peer imports at start but that need CUDA or are very large.

Only `sys.modules` is touched, no peer is edited, and nothing a stand-in answers is used on the
measured paths (verifying runs check their results).
"""

# ruff: noqa: ARG002  a finder is called with more than it needs

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__all__ = ["install"]


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub

    def __getitem__(cls, item: object) -> Any:
        return _Stub

    def __or__(cls, other: object) -> Any:
        return object

    def __ror__(cls, other: object) -> Any:
        return object


class _Stub(metaclass=_Meta):
    """Can be called, subclassed, subscripted, and used as a decorator with or without arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is _Stub and len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return _Stub()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub()

    def __getitem__(self, item: object) -> Any:
        return _Stub()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = set(names)

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        parts = fullname.split(".")
        heads = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        if any(head in self._names for head in heads):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: Any = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "0.0.0"
        stub: types.ModuleType = module
        return stub

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(*names: str) -> None:
    """From now on `import NAME` and `import NAME.anything` answer a stand-in."""
    sys.meta_path.insert(0, _Finder(names))
