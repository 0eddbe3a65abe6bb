# make env    a pinned environment in .venv (a no-op when up to date)
# make test   every test, two files at a time; tests that need a GPU are skipped, and say so
# make check  ruff, pyright, whitespace
# make demo   train a small Qwen3.5 on one process and on two with context parallelism, and compare
# make clean  remove what the above leave behind, but for .venv
#
# WORKERS       test files that run at a time: ranks wait for one another, and two files fill two cores
# PYTHON        the interpreter that .venv is made from
# TORCH_PIP     extra pip arguments for torch alone, for example an index that holds builds without CUDA

PYTHON ?= python3.11
TORCH_PIP ?=
WORKERS ?= 2
OLDEST_TRANSFORMERS := 5.17.0

VENV := .venv
BIN := $(VENV)/bin
OVERLAY := $(VENV)/transformers-$(OLDEST_TRANSFORMERS)
RANGE_TESTS := $(wildcard tests/test_transformers_range.py)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
EMPTY_TREE := $(shell git hash-object -t tree /dev/null)

# Nothing here may reach for the network, and two ranks must not use all cores twice.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DELETE_ON_ERROR:
.PHONY: help env test test-oldest check demo clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

env: $(VENV)/.installed

# torch goes first and alone: resolved together with the rest, a plain index may give it another build. Triton goes last,
# and what stands on it: a build of torch with CUDA has brought its own.
$(VENV)/.dependencies: .ci/requirements.txt
	$(PYTHON) -m venv $(VENV)
	grep -vE '^(triton|liger-kernel)==' .ci/requirements.txt >$(VENV)/requirements.txt
	$(PIP) install $(TORCH_PIP) --constraint $(VENV)/requirements.txt torch
	$(PIP) install --requirement $(VENV)/requirements.txt
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --no-deps $$(grep '^triton==' .ci/requirements.txt)
	$(PIP) install --no-deps $$(grep '^liger-kernel==' .ci/requirements.txt)
	rm -rf $(OVERLAY)
	$(PIP) install --no-deps --target $(OVERLAY) transformers==$(OLDEST_TRANSFORMERS)
	@touch $@

$(VENV)/.installed: $(VENV)/.dependencies pyproject.toml
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile
	@$(MAKE) --no-print-directory test-oldest

test-oldest: env
ifneq ($(RANGE_TESTS),)
	EXPECT_TRANSFORMERS=$(OLDEST_TRANSFORMERS) PYTHONPATH=$(abspath $(OVERLAY)) $(BIN)/python -m pytest $(RANGE_TESTS)
endif

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	git diff --check $(EMPTY_TREE)

demo: env
	$(BIN)/python recipes/demo.py

clean:
	rm -rf build dist runs *.egg-info .pytest_cache .ruff_cache
	find hf_cp kernels models recipes tests -name __pycache__ -type d -prune -exec rm -rf {} +
