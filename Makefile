# make setup      a virtual environment in .venv with all development dependencies
# make test       the whole test suite
# make test-fast  the suite without tests marked slow
# make test-builds  the engine's tests and the demo with each other build of the CPU kernels that this machine has
# make check      ruff, mypy, import-linter, length of commit subjects
# make docs       the documentation site in build/site; broken links fail
# make docs-reference  the pages of docs/ that are generated from the code and the tests
# make sanitize   the kernels' tests on kernels built with AddressSanitizer and UndefinedBehaviorSanitizer (gcc)
# make fuzz       INPUTS=100000 mutated inputs for the decoders of bytes from outside, GUIDES=2000 hostile guides
# make image      the container images with buildah; deploy/build_image.sh has the variables
# make image-demo  the built images as Redis, router, prefill and decode worker, by podman or BY=chroot: one answer
# make combinations  every combination of deploy/components rendered and checked, for long; the suite has each pair
# make prometheus Prometheus of Debian in build/prometheus, for the tests of alerts and dashboard; not installed
# make sbom       build/sbom.json: the installed packages with versions and licences, as CycloneDX (needs PyPI)
# make audit      known vulnerabilities of requirements.lock, and what was not audited (needs the records of pypi.org itself)
# make demo       a complete deployment with the small model: one prompt, the work of each worker, shutdown
# make format     ruff's fixes and formatting
# make clean      remove .venv and what was built
# make lock       resolve requirements.lock again from pyproject.toml
#
# AT_ONCE=0                     tests one after the other instead of four at a time
# INPUTS=1000000                more inputs for `make fuzz`
# PYTHON=python3.12             another interpreter for a new .venv (3.11 or newer)
# INSTALLER=pip                 pip instead of uv
# TORCH_INDEX=https://...       another index for torch; without an NVIDIA driver it is PyTorch's, of CPU builds

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export TORCH_INDEX ?=
INSTALLER ?= uv
AT_ONCE ?= 4
DEMO := tests/e2e/test_install.py::test_the_demo_of_the_wheel_shows_it_all_and_leaves_nothing
PYTEST = $(BIN)/python -m pytest --numprocesses $(AT_ONCE) --dist worksteal
PYTHON ?=
# Many container images forbid bytecode; each process would compile torch and transformers again (6 s).
export PYTHONDONTWRITEBYTECODE :=
CUDA_PACKAGES := cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc \
    cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)

# Marker files: the environment is up to date; one stub stands for all of them.
INSTALLED := $(VENV)/.installed
STUBS := protos/worker_pb2.py

.DEFAULT_GOAL := help
.PHONY: help setup test test-fast test-builds check docs docs-reference sanitize fuzz image image-demo combinations prometheus sbom audit demo lock format clean

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

$(INSTALLED): pyproject.toml requirements.lock install.py | $(BIN)/python
	@$(BIN)/python install.py --with $(INSTALLER)
	@touch $@

# The environment has the build requirements, so only the compiled parts are rebuilt.
$(STUBS): $(INSTALLED) setup.py $(wildcard protos/*.proto protos/*/*.proto) $(wildcard engine/cpu/kernels/*.h engine/cpu/kernels/*.cpp)
	@echo "protos/ and C++ kernels ..."
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@ls engine/cpu/kernels/_kernels*.so >/dev/null 2>&1 || \
	    echo "C++ kernels: not built (they need a C++ compiler and x86-64 Linux); workers run on torch alone, slower"
	@touch $@

test: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m 'not slow'

test-builds: setup
	@builds=$$($(BIN)/python -m tests.kernel_builds) || exit 1; \
	for build in $$builds; do \
	    echo "tests/engine and the demo with --kernels $$build"; \
	    DECANT_KERNELS=$$build $(PYTEST) tests/engine $(DEMO) || exit 1; \
	done

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/commit_subjects.py

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Open build/site/index.html, or for the search: python3 -m http.server --directory build/site"

docs-reference: setup
	$(BIN)/python -m docs.generate

SANITIZED := build/sanitized
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1
PRELOADED := libasan.so libubsan.so libstdc++.so.6
KERNEL_TESTS := $(addprefix tests/engine/test_,kernel_arguments.py kernel_attention.py kv_dtype.py gemm.py coded_weight.py fused_ops.py \
    step_batch.py adapter_bits.py) $(addprefix tests/engine/,fused_layer sampler)

# No leak check: Python never frees all of its objects, and torch's libraries do not support it. The extension
# is optional in setup.py, so this target checks that it was built.
sanitize: setup
	rm -rf $(SANITIZED)
	CFLAGS="$(SANITIZERS)" LDFLAGS="-fsanitize=address,undefined" $(BIN)/python setup.py --quiet build_ext \
	    --build-lib $(SANITIZED) --build-temp $(SANITIZED)/temp
	ls $(SANITIZED)/decant/engine/cpu/kernels/_kernels.*.so $(SANITIZED)/decant/engine/cpu/kernels/_kernels_avx512.*.so
	DECANT_SANITIZED=$(SANITIZED) OMP_WAIT_POLICY=passive ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	    LD_PRELOAD="$(foreach name,$(PRELOADED),$$(gcc -print-file-name=$(name)))" \
	    $(BIN)/python -m pytest -p tests.sanitized -p no:cacheprovider -q $(KERNEL_TESTS)

combinations: setup
	$(BIN)/python -m tests.deploy.every_combination

INPUTS ?= 100000
GUIDES ?= 2000

fuzz: setup
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS)
	$(BIN)/python -m tests.fuzz.guides --guides $(GUIDES)

image:
	@deploy/build_image.sh

BY ?= podman
TAG ?= latest

image-demo:
	@python3 deploy/image_demo.py --by $(BY) --tag $(TAG)

build/prometheus/usr/bin/promtool:
	@mkdir -p build/prometheus
	cd build/prometheus && { apt-get download prometheus || { apt-get update --quiet=2 && apt-get download prometheus; }; }
	cd build/prometheus && dpkg --extract prometheus_*.deb .

prometheus: build/prometheus/usr/bin/promtool

sbom: setup
	@mkdir -p build
	$(BIN)/python -m uv tool run --from cyclonedx-bom cyclonedx-py environment $(BIN)/python \
	    --pyproject pyproject.toml --mc-type application --output-file build/sbom.json
	@echo "build/sbom.json"

audit: setup
	$(BIN)/python .ci/audit.py

demo: setup
	@$(BIN)/python -m decant.command demo

# torch's metadata determines CUDA's libraries, for a build of torch that uses them.
lock: setup
	$(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 --extra all --extra dev --extra docs --no-annotate \
	    --custom-compile-command 'make lock' $(foreach name,$(CUDA_PACKAGES),--no-emit-package $(name)) \
	    --output-file requirements.lock pyproject.toml

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info protos/*_pb2.py protos/*_pb2.pyi protos/*_pb2_grpc.py
