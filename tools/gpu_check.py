"""Check the copy engine and the runtime on a machine with an NVIDIA GPU, in at most 5 minutes.

    python tools/gpu_check.py [--device cuda:0] [--budget 270] [--only order --only whole]

Needs torch with CUDA and numpy; the step `whole` also what phloem itself needs, and transformers.
Prints a row for each step and writes JSON. Exit status 0: every check held; 1: one did not; 3:
there is no GPU here.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import importlib.util
import os
import subprocess
import sys
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 3


def reach() -> None:
    """Make phloem importable from the checkout, without its front door where that needs more."""
    sys.path[:0] = [str(ROOT / folder) for folder in ("tools", "src", "tests")]
    if any(importlib.util.find_spec(name) is None for name in ("anyio", "msgspec", "structlog")):
        package = types.ModuleType("phloem")
        package.__path__ = [str(ROOT / "src" / "phloem")]
        sys.modules["phloem"] = package


def machine(device: str) -> dict[str, float | str]:
    """What the figures were measured on."""
    import torch

    from phloem.cuda_streams.cuda import CudaDriver

    driver = CudaDriver(device)
    properties = torch.cuda.get_device_properties(driver.device)
    facts: dict[str, float | str] = {
        "gpu": properties.name,
        "memory": f"{properties.total_memory >> 30} GiB",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cpus": float(os.cpu_count() or 1),
        "batched copies": "yes" if driver.batch_copy is not None else "no",
        "near": driver.near.why,
    }
    query = "driver_version,pcie.link.gen.current,pcie.link.width.current"
    try:
        ran = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        facts["driver, PCIe, width"] = ran.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError) as error:
        facts["driver, PCIe, width"] = f"unknown: {error}"
    return facts


def main() -> int:
    """Run the steps asked for; see the module."""
    from gpu_checks import failures, order, overlap, rates, whole
    from gpu_checks.bed import Bed, cuda_bed
    from gpu_checks.table import Outcome, Row, Step, failed, run_steps, write_json

    from phloem.errors import InvalidRequest

    async def facts(bed: Bed) -> Outcome:
        return Outcome(machine(str(bed.driver.device)))

    # What decides most comes first: the budget may end before the list does.
    steps: list[Step[Bed]] = [
        Step("machine", 5, facts),
        Step("order", 15, order.order),
        Step("events", 2, order.events),
        Step("programs", 30, order.programs),
        Step("capture", 5, order.capture),
        Step("whole", 45, whole.whole),
        Step("overlap", 25, overlap.overlap),
        Step("lost", 20, failures.lost),
        Step("pinning", 10, rates.pinning),
        Step("refused", 3, failures.refused_pinning),
        Step("codes", 3, order.codes),
        Step("completion", 6, rates.completion),
        Step("gil", 5, rates.gil),
        Step("link", 15, rates.link),
        Step("scattered", 30, rates.scattered),
        Step("interference", 15, rates.interference),
    ]
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--budget", type=float, default=270, metavar="SECONDS")
    parser.add_argument("--only", action="append", choices=[step.name for step in steps])
    figures = ROOT / "build" / "gpu_check.json"
    parser.add_argument("--json", type=Path, default=figures, metavar="FILE")
    parser.add_argument("--lose", action="store_true", help="lose the device; for the step `lost`")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.budget + 20, exit=True)  # whatever may hang
    try:
        if arguments.lose:
            print(asyncio.run(failures.lose_the_device(arguments.device)), flush=True)
            os._exit(0)  # what is left of CUDA in this process only complains
        bed = cuda_bed(arguments.device)
    except InvalidRequest as error:
        print(f"no check was made: {error}", file=sys.stderr)
        return NO_GPU
    chosen = [step for step in steps if arguments.only is None or step.name in arguments.only]
    told: list[Row] = []

    def tell(row: Row) -> None:
        print(row, flush=True)
        told.append(row)
        write_json(arguments.json, told)  # what hangs later takes nothing of it away

    rows = run_steps(chosen, bed, budget_s=arguments.budget, clock=time.monotonic, tell=tell)
    print(f"{arguments.json} has the figures")
    return int(failed(rows))


if __name__ == "__main__":
    reach()
    sys.exit(main())
