"""What a bug report needs to know about the machine: `phloem env`."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import msgspec
import torch

__all__ = ["Environment", "look", "version_of"]

_PACKAGES = (
    *("phloem", "torch", "numpy", "anyio", "structlog", "msgspec", "uvloop"),
    *("transformers", "safetensors", "rich"),
)


class Environment(msgspec.Struct, frozen=True):
    """The versions and the machine. `packages`: None is not installed; memory is in bytes."""

    packages: dict[str, str | None]
    python: str
    platform: str
    loops: list[str]
    cpu: str
    cpus: int
    cpus_usable: int
    memory_bytes: int | None
    torch_threads: int
    torch_debug: bool
    torch_cuda: str | None
    torch_hip: str | None
    torch_git: str | None
    gpus: list[str]


def look() -> Environment:
    """Look at the machine this process runs on."""
    packages = {name: version_of(name) for name in _PACKAGES}
    packages["torch"] = str(torch.__version__)  # with the build, which metadata may lack: +cu130
    return Environment(
        packages=packages,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        loops=["asyncio", *(["uvloop"] if packages["uvloop"] else [])],
        cpu=_cpu(),
        cpus=os.cpu_count() or 1,
        cpus_usable=_cpus_usable(),
        memory_bytes=_memory_bytes(),
        torch_threads=torch.get_num_threads(),
        torch_debug=torch.version.debug,
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        torch_git=torch.version.git_version,
        gpus=[torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
    )


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The model of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpus_usable() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # systems without affinity
        return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # systems without these names
        return None
