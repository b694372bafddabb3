# make setup      a virtual environment in .venv with everything that development needs
# make test       the whole test suite
# make test-fast  the suite without what is marked slow
# make check      ruff, mypy, import-linter
# make demo       a whole deployment with the small model: one question, what each worker did, the end
#
# AT_ONCE=0                     tests one after the other instead of three at a time
# PYTHON=python3.12             another interpreter for a new .venv (3.11 or newer)
# TORCH_INDEX=https://...       another index for torch, such as PyTorch's own with its CPU builds

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH_INDEX ?=
AT_ONCE ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(AT_ONCE) --dist worksteal
PYTHON ?=

# What tells that the environment is up to date, and one of the stubs for all of them.
INSTALLED := $(VENV)/.installed
STUBS := protos/worker_pb2.py

.DEFAULT_GOAL := help
.PHONY: help setup test test-fast check demo format clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

setup: $(STUBS)

$(BIN)/python:
	@for python in $(or $(PYTHON),python3.11 python3.12 python3 python3.13); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "creating $(VENV) with $$("$$python" --version)"; \
	        exec "$$python" -m venv $(VENV); \
	    fi; \
	done; \
	echo "Decant needs Python 3.11 or newer; tried: $(or $(PYTHON),python3.11 python3.12 python3 python3.13)." \
	     "Name one with PYTHON=/path/to/python." >&2; \
	exit 1

# torch by version first: without one, a dependency of a dependency may choose another build.
$(INSTALLED): pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[all,dev]'
	@touch $@

# The environment has the build requirements, so only what is compiled is made again.
$(STUBS): $(INSTALLED) $(wildcard protos/*.proto) $(wildcard engine/native/*.h engine/native/*.cpp)
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .

test: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m 'not slow'

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: setup
	@$(BIN)/python -m decant.command demo

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info protos/*_pb2.py protos/*_pb2.pyi protos/*_pb2_grpc.py
