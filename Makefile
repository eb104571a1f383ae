# Commands of a fresh clone. Everything runs in .venv, which the first of them makes and the others reuse.
#   make demo        train a 12-layer GPT-2 under half of its activation memory, on CPU
#   make test        lint, then every test that is neither slow nor in need of a GPU
#   make test-slow   the slow ones, and those for a CUDA device where there is one
#   make lint        ruff (rules and format) and mypy --strict
#   make bench       the benchmarks behind the figures in README.md

PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCHMARKS ?= peaks gpt2_gap noop llama8b_offline
TORCH := $(shell grep '^torch==' constraints.txt)

# One thread per process: figures that do not depend on the number of cores, and room for several test workers.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1

.PHONY: demo test test-slow lint bench

demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo

test: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow and not cuda"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m "slow or cuda"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	@for benchmark in $(BENCHMARKS); do \
		echo "== benchmarks.$$benchmark"; \
		$(BIN)/python -m benchmarks.$$benchmark || exit 1; \
	done

# torch first and by itself: whichever build of it is there already, or the index in use offers, stays.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@
