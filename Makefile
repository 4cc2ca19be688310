# Everything lives in .venv; nothing has to be activated. Two commands do all set-up: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

# The checkout that the environment was made in: its scripts hold that path, so a moved one is made anew.
VENV_OK := $(shell test "$$(cat $(VENV)/.tools 2>/dev/null)" = "$(CURDIR)" && $(BIN)/python -c "" 2>/dev/null && echo yes)

.NOTPARALLEL:
.PHONY: FORCE help setup demo test test-unit test-patches test-native test-server test-packaging native vendor refresh check-patches lint fmt docs clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  +##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.installed ## environment with the package in it, built for this machine

FORCE:

$(VENV)/.tools: $(if $(VENV_OK),,FORCE)
	@test ! -e $@ || rm -rf $(VENV)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python is too old: $$($(PYTHON) --version), expected 3.10 or newer; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python -m venv failed; on Debian: apt install python3-venv" >&2; exit 1; }
	$(BIN)/pip install -q --upgrade "pip>=25.1" "cmake>=3.21,<4.1" ninja
	@echo "$(CURDIR)" >$@

# The environment variables and tools that decide the build (CMAKE_ARGS, CC, nvcc, ..) are in its key.
$(VENV)/.key: $(VENV)/.tools FORCE
	@key="$(CURDIR) $$($(BIN)/python scripts/vendor.py key native)" || exit 1; \
	  test "$$(cat $@ 2>/dev/null)" = "$$key" || echo "$$key" >$@

# One native build serves the editable install, the wheel and the tests.
$(VENV)/.installed: $(VENV)/.tools $(VENV)/.key pyproject.toml CMakeLists.txt CMakePresets.json vendor/pin.txt patches/series $(wildcard patches/*.patch cmake/* scripts/vendor.py scripts/native.py)
	prefix=$$($(BIN)/python scripts/native.py build native) && \
	  LLAMA_DFLASH_PREBUILT="$$prefix" $(BIN)/pip install -q -e ".[bench,test]"
	@touch $@

demo: setup      ## the embedded trained pair, plain and with drafts
	@$(BIN)/llama-dflash demo

# cuBLAS' headers, for the test that compiles the CUDA files: only where there is an nvcc, and only if it lacks them.
$(VENV)/.cuda: $(VENV)/.tools pyproject.toml
	@if command -v nvcc >/dev/null; then \
	  $(BIN)/python scripts/cuda_compile.py --tools >/dev/null 2>&1 || $(BIN)/pip install -q --no-deps --group cuda || exit 1; \
	  touch $@; \
	fi

test: setup $(VENV)/.cuda lint check-patches ## everything
	$(BIN)/python -m pytest -m "not gpu"

test-unit: setup ## no native library
	$(BIN)/python -m pytest tests/unit tests/patches

test-patches: setup ## the patch queue's own tests
	$(BIN)/python -m pytest tests/patches

test-native: setup $(VENV)/.cuda ## exact build: arithmetic, golden vectors, text equality
	$(BIN)/python -m pytest tests/native

test-server: setup ## llama-server on loopback
	$(BIN)/python -m pytest tests/server

test-packaging: setup ## wheels, fresh environments
	$(BIN)/python -m pytest tests/packaging -m "not gpu"

native: setup    ## also build the exact preset and the unpatched reference
	$(BIN)/python scripts/native.py build exact
	$(BIN)/python scripts/native.py build reference

vendor: $(VENV)/.tools ## unpack and patch llama.cpp for editing (docs/patches.md)
	$(BIN)/python scripts/vendor.py prepare

refresh: $(VENV)/.tools ## export the commits of vendor/llama.cpp to patches/
	$(BIN)/python scripts/patchq.py refresh

check-patches: $(VENV)/.tools ## the queue applies, is exported and in order
	@$(BIN)/python scripts/patchq.py check

$(VENV)/.lint: $(VENV)/.tools pyproject.toml
	$(BIN)/pip install -q --group dev
	@touch $@

lint: $(VENV)/.lint setup ## style and types; docs/cli.md is current
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/gen_docs.py --check

fmt: $(VENV)/.lint ## fix what can be fixed
	$(BIN)/ruff check --fix .

docs: setup      ## regenerate docs/cli.md and the tables in README
	$(BIN)/python scripts/gen_docs.py

clean:           ## the environment and build folders; the build cache stays
	rm -rf $(VENV) build dist
