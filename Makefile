# Everything a newcomer needs: `make quickstart`, `make test`, `make ui`. Needs Python 3.11 or newer and make.
# After the first installation nothing here uses the network.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
PORT ?= 5000
WHAT ?=
CONSTRAINTS ?= constraints.txt

# One thread a process: the cores are used by running tests side by side.
test: export OMP_NUM_THREADS ?= 1
# No usage reports from the tools we call (MLflow honours it).
export DO_NOT_TRACK ?= 1

BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install packages venv quickstart test look browser ui gpu slurm aot bench-step bench-cpu lint lock test-floor clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED)  ## create .venv and install what the other targets need (they do it themselves)

# The stamp holds what was installed for: files with a new date and the old text ask for nothing.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@cat $^ | cmp -s - $@ || { $(MAKE) --no-print-directory packages && cat $^ > $@; }
	@touch $@

packages:
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(MAKE) --no-print-directory venv
	@echo "Installing into $(VENV); the first time this takes some minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'

venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "mixerlab needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "Name another one, this once: make install PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments (Debian, Ubuntu: install the package python3-venv)." >&2; exit 1; }
	@# A broken environment is made anew; a folder that is none is never emptied.
	@$(PYTHON) -m venv $$(test ! -f $(VENV)/pyvenv.cfg || echo --clear) $(VENV)

quickstart: $(INSTALLED)  ## train the quickstart grid, write the report, print the headline
	@status=0; $(BIN)/python -m experiments.train -m +experiment=quickstart || status=$$?; \
	$(BIN)/python -m analysis.report --sweep quickstart --no-mlflow || exit $$?; \
	echo "Every run, curve and option in the browser: make ui"; exit $$status

test: $(INSTALLED)  ## all tests (WHAT='-k mqar' or a path narrows them)
	@$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(WHAT)

# The stamp holds what was installed for, as above.
LOOK = $(VENV)/.look
$(LOOK): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev,look]'
	@cp $(INSTALLED) $@

look: $(LOOK) browser  ## open the report and MLflow's comparison in a headless Chromium; screenshots in build/look
	@$(BIN)/python -m pytest -s tests/look

browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name >/dev/null 2>&1 && exit 0; done; \
	if [ -n "$$BROWSER_PATH" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	  echo "Installing Debian's chromium."; \
	  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends chromium; } \
	    >$(VENV)/chromium.log 2>&1 || { tail -n 20 $(VENV)/chromium.log >&2; exit 1; }; \
	else echo "make look needs Chromium or Chrome: apt-get install chromium, or BROWSER_PATH=/path/of/it" >&2; exit 1; fi

ui: $(INSTALLED)  ## the newest comparison in MLflow, on http://127.0.0.1:5000 (PORT=5001 for another)
	@$(BIN)/python -m experiments.ui port=$(PORT)

# Tests of Triton kernels: they compile a lot, so they are dealt to several processes without needing pytest-xdist.
GPU_TESTS = tests/gpu $(wildcard tests/kernels/test_*_triton.py) tests/kernels/test_attention_operators.py
PARTS = 0 1 2 3 4 5 6 7 8 9 10 11

gpu:  ## where a GPU is: test the kernels on it and measure them (PYTHON with torch, triton, einops and pytest)
	@status=0; running=; for part in $(PARTS); do \
	  TEST_PART=$$part/$(words $(PARTS)) $(PYTHON) -m pytest -q $(GPU_TESTS) & running="$$running $$!"; done; \
	for process in $$running; do wait $$process || status=1; done; \
	$(PYTHON) -m kernels.bench_gpu --write || status=1; \
	$(PYTHON) -m kernels.bench_gpu_sparse --write || status=1; \
	$(PYTHON) -m kernels.bench_gpu_linear || status=1; exit $$status

slurm: $(INSTALLED)  ## where Debian's slurm-wlm and munge are, as root: a grid on a Slurm of one node
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[slurm]'
	@tests/slurm/with_slurm $(BIN)/python -m pytest -s tests/slurm

aot: $(INSTALLED)  ## compile every Triton kernel for GPUs that need not be here, into docs/kernels_gpu.md
	@TRITON_DEFAULT_FP_FUSION=1 $(BIN)/python -m kernels.triton_aot --write

bench-step: $(INSTALLED)  ## what the framework adds to a training step, against a bare PyTorch loop
	@$(BIN)/python -m experiments.bench_step

bench-cpu: $(INSTALLED)  ## the ops on a CPU against what people use instead: docs/kernels_cpu.md
	@$(BIN)/python -m kernels.bench && $(BIN)/python -m kernels.bench_linear && \
	  $(BIN)/python -m mixers.bench && $(BIN)/python -m mixers.bench_mamba

lint: $(INSTALLED)  ## ruff, import-linter, and mypy on kernels, mixers and arch
	@status=0; for check in 'ruff check .' lint-imports mypy; do $(BIN)/$$check || status=1; done; exit $$status

lock: $(INSTALLED)  ## pin in constraints.txt what .venv holds (after `make clean` and a change of dependencies)
	@{ sed -n '/^#/p' constraints.txt; \
	  $(BIN)/python -m pip freeze --all --exclude-editable --exclude pip --exclude triton | sed 's/+.*//'; } > constraints.new
	@mv constraints.new constraints.txt && cat pyproject.toml constraints.txt > $(INSTALLED)

test-floor:  ## all tests on the oldest versions that pyproject.toml allows (on Linux a GPU build of torch: 5 GB)
	@$(MAKE) --no-print-directory test VENV=.venv-floor CONSTRAINTS=constraints-floor.txt

clean:  ## remove .venv and caches; runs/ stays
	rm -rf .venv .venv-floor build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
