# Every target sets up what it needs, from nothing but Python 3.11+, in a virtual environment of the project.
PYTHON ?= python3
VENV ?= .venv
# torch goes in first and alone. Name another build with TORCH and TORCH_ARGS, for example
#   make demo TORCH=torch TORCH_ARGS="--index-url <the PyTorch index of your CPU or CUDA build>"
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: venv demo test test-loops check check-report bench bench-peers replay-table fuzz sim mutants gpu-check clean

venv: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check $(TORCH_ARGS) "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(READY)

demo: venv
	$(BIN)/python -m phloem demo

test: venv
	$(BIN)/python -m pytest -q

# The asynchronous tests on the simulated loop alone, by more seeds.
LOOP_SEEDS ?= 10
test-loops: venv
	$(BIN)/python -m pytest -q -k sim- --sim-seeds $(LOOP_SEEDS) tests/actors tests/models tests/observe tests/runtime tests/streams

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_layout.py tests/test_tidy.py

# The report in a headless browser (pictures in build/), the timeline in Perfetto's reader: each where it is on the PATH.
check-report: venv
	PHLOEM_CHECK_REPORT=1 $(BIN)/python -m pytest -q -rs tests/observe/test_browser.py

bench: venv
	$(BIN)/python -m benchmarks

# Needs about 5 GB for the peers' own environments, in ~/.cache/peers or $(PEERS_VENVS).
bench-peers: venv
	$(BIN)/python -m benchmarks.peers

# Known policies at all points of the published comparison: TRACES is where the whole traces are.
replay-table: venv
	$(BIN)/python -m benchmarks.known_policies --traces "$(TRACES)"

fuzz: venv
	PHLOEM_FUZZ=1 $(BIN)/python -m pytest -q -m fuzz

# Seeds over all schedulers, workloads and faults; SEEDS=0:20000 takes about half an hour on two cores.
SEEDS ?= 0:20000
sim: venv
	$(BIN)/python -m phloem simulate --seeds $(SEEDS) --jobs $$(nproc)

# Small bugs put into copies of the package: how many seeds it takes to find each.
mutants: venv
	$(BIN)/python tests/sim/mutants.py

# On a machine with an NVIDIA GPU, at most 5 minutes. $(PYTHON) needs torch with CUDA, and phloem's other dependencies
# for the step that runs the whole of it. Figures go to build/gpu_check.json; GPU_ARGS="--only order" runs less.
GPU_ARGS ?=
gpu-check:
	$(PYTHON) tools/gpu_check.py $(GPU_ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
