# `make demo` and `make test` need only Python 3.11 or newer, git and make; the first use sets up $(VENV).
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
# The GPU tests mostly compile: one worker a core or two.
GPU_WORKERS ?= 8

BIN = $(VENV)/bin
DEV = $(VENV)/.installed-dev

.PHONY: help demo test lint format types imports docs docs-check proof check bench triton gpu-check tune clean

help:
	@echo "make demo       install, train a small language model, generate text, compare with softmax attention"
	@echo "make test       the tests"
	@echo "make check      what CI runs: lint, types, import direction, generated docs, tests"
	@echo "make format     let ruff rewrite what it can"
	@echo "make docs       write docs/mechanisms/ anew from the registry"
	@echo "make proof      compare with other implementations and write docs/proof.md"
	@echo "make bench      the CPU benchmark, beside other libraries: about six minutes"
	@echo "make gpu-check  the GPU tests and the GPU benchmark, with the torch of PYTHON=$(PYTHON)"
	@echo "make tune       launch settings of the GPU kernels, measured anew"
	@echo "make clean      remove the virtual environment and every cache"

# One stamp an extra: installed again only when the requirements change.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "linattn needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$*]"
	@touch $@

demo: $(VENV)/.installed-all
	$(BIN)/linattn demo

# The workers share the cores, so each keeps to one thread.
test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV)
	$(BIN)/mypy

imports: $(DEV)
	$(BIN)/python tools/check_imports.py

docs: $(DEV)
	$(BIN)/python tools/make_docs.py

proof: $(DEV)
	OMP_NUM_THREADS=2 $(BIN)/python tools/make_proof.py

docs-check: $(DEV)
	$(BIN)/python tools/make_docs.py --check

# Tests of the GPU kernels run in Triton's interpreter; where there is no Triton they are skipped. Not in an extra:
# on Linux torch itself asks for a certain version of it, except the torch built for CPUs only.
triton: $(DEV)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet triton==3.6.0 \
		|| echo "no Triton for this machine: its tests are skipped"

check: lint types imports docs-check triton test

bench: $(DEV)
	$(BIN)/python -m linattn.benchmark

# No virtual environment: the GPU code is to be tested against the torch and driver that the machine has.
gpu-check:
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu -n $(GPU_WORKERS) --dist worksteal
	PYTHONPATH=src $(PYTHON) -m linattn.benchmark.gpu
	PYTHONPATH=src $(PYTHON) tools/sanitize_gpu.py

tune:
	PYTHONPATH=src $(PYTHON) -m linattn.benchmark.tune

clean:
	rm -rf $(VENV) build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
