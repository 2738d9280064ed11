"""The peers and the environments they run in, each of its own, outside the repository.

The wheels are installed without their dependencies, most of which need CUDA; what an import of the
cache needs is listed here. About 2.5 GB for each environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["PEERS", "Environment", "interpreter"]

_TORCH = ("torch==2.13.0", "numpy")
_COMMON = (
    *("regex", "psutil", "requests", "tqdm", "transformers", "pydantic", "orjson", "pillow"),
    *("pyzmq", "msgspec", "einops", "cloudpickle", "setproctitle", "pybase64", "fastapi", "numba"),
    *("packaging", "partial-json-parser", "openai", "xxhash", "aiohttp", "ninja", "uvloop"),
    *("openai-harmony", "anthropic"),
)


class Environment(NamedTuple):
    """A virtual environment: its name, the peer's wheel, and what importing it needs."""

    name: str
    wheel: str
    needs: tuple[str, ...]


_SGLANG = Environment(
    "sglang",
    "sglang==0.5.23",
    (
        *_COMMON,
        *("prometheus-client", "uvicorn", "python-multipart", "scipy", "distro", "interegular"),
        *("zstandard", "IPython", "easydict", "dill"),
    ),
)
_VLLM = Environment(
    "vllm",
    "vllm==0.33.0",
    (
        *_COMMON,
        *("cachetools", "blake3", "py-cpuinfo", "prometheus_client", "cbor2", "pyyaml", "ijson"),
        *("opentelemetry-api", "opentelemetry-sdk", "tiktoken", "jsonschema", "depyf"),
        "watchfiles",
    ),
)
# Adapter -> the environment it runs in; None: the one that runs this.
PEERS: dict[str, Environment | None] = {
    "phloem_nowait": None,
    "phloem_one_memory": None,
    "sglang_rust": _SGLANG,
    "sglang_python": _SGLANG,
    "vllm_hybrid": _VLLM,
}


def _home() -> Path:
    return Path(os.environ.get("PEERS_VENVS", Path.home() / ".cache" / "peers"))


def interpreter(environment: Environment | None, tell: Callable[[str], None]) -> Path:
    """The Python of an environment, which is made when it is not there (minutes)."""
    if environment is None:
        return Path(sys.executable)
    folder = _home() / environment.name
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        tell(
            f"installing {environment.wheel} into {folder} (minutes; "
            "pip will say that dependencies are missing, which is meant)"
        )
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run([*pip, *_TORCH], check=True)
        subprocess.run([*pip, "--no-deps", environment.wheel], check=True)
        subprocess.run([*pip, *environment.needs], check=True)
        ready.touch()
    return python
