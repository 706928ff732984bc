# Two commands do all the set-up on a bare machine (git, make, Python, a compiler):
#
#     make train    makes .venv, installs what training needs, trains the byte-level GPT with int8 state
#     make test     makes .venv if it is missing, installs, runs every check and the whole test suite
#
# PYTHON=python3.12 picks the interpreter of a new .venv, ARGS='model=small' adds to the training command, JOBS sets the
# test processes, and PYTEST_ARGS='-k scale' goes to pytest. pip's own settings of the machine apply as they are.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n $(JOBS)

# What a finished installation leaves; older than any of these files, it is done again.
INSTALL_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard lightning_fuse/kernels/cpu/src/*)
TRAIN_STAMP := $(VENV)/.installed-train
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: help train test test-fast test-slow lint format browser clean
.DELETE_ON_ERROR:

help:
	@awk '!/^#/ { exit } { sub(/^# ?/, ""); print }' Makefile

train: $(TRAIN_STAMP)
	$(BIN)/python train.py optimizer=adamw_fused state=int8 $(ARGS)

test: lint
	$(PYTEST) $(PYTEST_ARGS)

# For the minutes between two edits; `make test` is what has to pass.
test-fast: $(DEV_STAMP)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(DEV_STAMP)
	$(PYTEST) -m slow $(PYTEST_ARGS)

lint: $(DEV_STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(DEV_STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

# For tests/reports/test_browser.py: the machine's own Chromium, or Debian's where we may install it. Without one these
# tests are skipped. Continuous integration calls this; `make test` alone installs nothing outside .venv.
browser:
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	else \
	  echo "no Chromium here, and only root with apt-get gets one this way: install it with your system's tools"; exit 1; \
	fi

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The interpreter is order-only: its own date says nothing about what is installed.
$(TRAIN_STAMP): $(INSTALL_INPUTS) | $(BIN)/python
	@echo "installing lightning_fuse[train] into $(VENV) (a few minutes the first time)"
	$(PIP_INSTALL) -e '.[train]'
	@touch $@

$(DEV_STAMP): $(INSTALL_INPUTS) | $(BIN)/python
	@echo "installing lightning_fuse[dev] into $(VENV) (a few minutes the first time)"
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(TRAIN_STAMP)

# Every bit of the native kernel in every combination, over 20 steps; `make test` walks a part of it.
.PHONY: matrix
matrix: $(DEV_STAMP)
	LIGHTNING_FUSE_WHOLE_MATRIX=1 $(PYTEST) tests/kernels/test_native_matrix.py -k whole_matrix $(PYTEST_ARGS)

# The native kernel under the address and undefined-behaviour sanitizers, which come with GCC: built apart, without cmake,
# and run with the tests of its bits. The flags are those of CMakeLists.txt, and a test compares them.
CPU_SOURCES := lightning_fuse/kernels/cpu/src
SANITIZED := build/sanitize
SANITIZE_FLAGS := -std=c++17 -O1 -g -fPIC -fvisibility=hidden -fopenmp -fno-math-errno -fno-trapping-math \
	-ffp-contract=off -fno-exceptions -fno-rtti -Wall -Wextra -fsanitize=address,undefined \
	-fno-sanitize-recover=undefined -fno-omit-frame-pointer -DLIGHTNING_FUSE_LEVEL=baseline
SANITIZE_TESTS := tests/kernels/test_native_bits.py -m "not slow" -k "pair_of_choices or chunks or kept or ends_of or blocks_of or 16_bit"
ASAN = $(shell $(CXX) -print-file-name=libasan.so)
UBSAN = $(shell $(CXX) -print-file-name=libubsan.so)

$(SANITIZED)/lightning_fuse_cpu.so: $(wildcard $(CPU_SOURCES)/*)
	@mkdir -p $(SANITIZED)
	$(CXX) $(SANITIZE_FLAGS) -shared $(CPU_SOURCES)/level.cpp $(CPU_SOURCES)/library.cpp -o $@

.PHONY: sanitize
sanitize: $(DEV_STAMP)
	@if test -e '$(ASAN)' && test -e '$(UBSAN)'; then $(MAKE) --no-print-directory sanitized; \
	else echo "sanitizers skipped: $(CXX) has no libasan and libubsan here"; fi

# Leaks are Python's own affair. A report goes to the file descriptor that pytest would else keep, and lose with the process.
.PHONY: sanitized
sanitized: $(SANITIZED)/lightning_fuse_cpu.so
	LD_PRELOAD='$(ASAN) $(UBSAN)' ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LIGHTNING_FUSE_CPU_LIBRARY=$(CURDIR)/$< \
	$(BIN)/python -m pytest -p no:xdist --capture=sys $(SANITIZE_TESTS) $(PYTEST_ARGS)
