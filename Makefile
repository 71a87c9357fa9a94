# make help says what there is. The first run of a target makes .venv and installs what
# that target needs; later runs find it there.
#
#   PYTHON=python3.12 make test     another Python (3.11 or newer)
#   NO_VENV=1 make gpu-check        use PYTHON as it is and install nothing
#   JOBS=4 make test                parallel test processes

SHELL := /bin/bash
.DEFAULT_GOAL := help

ifndef PYTHON
# The first Python on the path that is new enough.
PYTHON := $(firstword $(foreach p,python3 python python3.14 python3.13 python3.12 \
    python3.11,$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' \
    2>/dev/null)))
endif
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))

VENV := .venv
FLOORS := .venv-floors
ARCHS := sm_80 sm_86 sm_89 sm_90a sm_100 sm_120
# What the compiler said of the kernels, by the digest of their text.
KNOWN := --known tests/record/compiled.tsv $(addprefix --arch ,$(ARCHS))
CUDA_FILES = $(shell find cuda_src -name '*.cu' -o -name '*.cuh')

# Read from setup.cfg: python3.11, numpy==2.1.2 and so on.
FLOOR_PYTHON ?= $(shell command -v python$$(sed -n 's/^python_requires = >=//p' setup.cfg))
FLOOR_NUMBERS = $(shell sed -n '/^install_requires/,/^$$/s/^    \([a-z]*\)>=/\1==/p' setup.cfg)

# The CUDA extra of this machine, empty without a GPU.
CUDA_EXTRA = $(shell $(PYTHON) tools/cuda_extra.py)
comma := ,

ifdef NO_VENV
PY := $(PYTHON)
CLANG_FORMAT := clang-format
STAMP =
else
PY := $(VENV)/bin/python
CLANG_FORMAT := $(VENV)/bin/clang-format
STAMP = $(VENV)/.installed-$(1)
endif

# A test that hangs is a failure after 15 minutes; the longest takes one or two.
PYTEST = -m pytest -n $(JOBS) --timeout 900 $(PYTEST_ARGS)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "cupyflash needs Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo \
	  "$(PYTHON) cannot make a virtual environment: install its venv package"; exit 1; }

# One stamp for each set of extras; installed again when the lists change.
# With a GPU the CUDA libraries of its driver come too.
$(VENV)/.installed-demo: EXTRAS = demo$(addprefix $(comma),$(CUDA_EXTRA))
$(VENV)/.installed-bench: EXTRAS = bench$(addprefix $(comma),$(CUDA_EXTRA))
$(VENV)/.installed-numbers: EXTRAS = bench,demo,gallery$(addprefix $(comma),$(CUDA_EXTRA))
# Every kernel is compiled by the tests, GPU or not.
$(VENV)/.installed-test: EXTRAS = test,$(or $(CUDA_EXTRA),nvrtc)
$(VENV)/.installed-lint: EXTRAS = lint
$(VENV)/.installed-docs: EXTRAS = docs,gallery

# All that .ci/run needs, in one go.
$(VENV)/.installed-ci: EXTRAS = lint,docs,gallery,test,$(or $(CUDA_EXTRA),nvrtc)

$(VENV)/.installed-%: setup.cfg pyproject.toml | $(VENV)/bin/python
	@echo "Installing cupyflash[$(EXTRAS)] into $(VENV)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@ $(and $(filter ci,$*),$(addprefix $(VENV)/.installed-,lint docs test))

# The oldest Python, NumPy and SciPy that setup.cfg allows, and the newest of the rest.
$(FLOORS)/.installed: setup.cfg pyproject.toml
	@test -n "$(FLOOR_PYTHON)" || { \
	  echo "make floors needs Python 3.11: FLOOR_PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(FLOORS)/bin/python || $(FLOOR_PYTHON) -m venv $(FLOORS)
	@echo "Installing cupyflash[test] with $(FLOOR_NUMBERS) into $(FLOORS)"
	@$(FLOORS)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]" \
	  $(FLOOR_NUMBERS)
	@touch $@

.PHONY: help demo test floors lint format compile docs linkcheck gpu-check gpu-proof \
  gpu-fuzz gpu-sanitize gpu-record bench numbers tables clean ci-install docs-check

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(call STAMP,demo)  ## Fit simulations, estimate a density, compare the methods
	@$(PY) -m cupyflash demo $(DEMO_ARGS)

test: $(call STAMP,test)  ## All tests that this machine can run
	$(PY) $(PYTEST)

floors: $(FLOORS)/.installed  ## The CPU tests with the oldest Python, NumPy and SciPy
	$(FLOORS)/bin/python $(PYTEST)

lint: $(call STAMP,lint)  ## ruff, clang-format, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(CUDA_FILES)
	$(PY) -m mypy
	git ls-files -z | xargs -0 -r $(PY) tools/check_text.py
	$(PY) -m cupyflash compile --missing $(KNOWN)

format: $(call STAMP,lint)  ## Format Python and CUDA in place
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CUDA_FILES)

compile: $(call STAMP,test)  ## Compile the kernels that changed, without a GPU; FULL=1: all
	$(PY) -m cupyflash compile --quiet --prune $(if $(FULL),--full) $(KNOWN) $(COMPILE_ARGS)

docs: $(call STAMP,docs)  ## Documentation in docs/_build/html
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

docs-check: $(call STAMP,docs)  ## Look at every page of the documentation in Chromium
	$(PY) tools/check_site.py

linkcheck: $(call STAMP,docs)  ## Whether the links of the documentation lead somewhere
	$(PY) -m sphinx -q -b linkcheck -D plot_gallery=0 docs docs/_build/linkcheck

gpu-check: $(call STAMP,test)  ## GPU tests on all cards, none skipped; writes tests/record/gpu_record.json
	$(PY) tests/record/gpu_record.py --write $(PYTEST_ARGS)

gpu-proof: $(call STAMP,test)  ## The part of gpu-check in tests/gpu, from contracts to threads
	$(PY) tests/record/gpu_record.py --write tests/gpu $(PYTEST_ARGS)

gpu-fuzz: $(call STAMP,test)  ## 5,000 random problems on a GPU, into the record
	$(PY) tests/support/fuzz_gpu.py --record $(FUZZ_ARGS)

gpu-sanitize: $(call STAMP,test)  ## compute-sanitizer over every kernel, into the record
	$(PY) tests/record/sanitize.py --record $(SANITIZE_ARGS)

gpu-record:  ## Is tests/record/gpu_record.json of these sources, and which kernels were met
	@$(PYTHON) tests/record/gpu_record.py --check $(RECORD_ARGS)

bench: $(call STAMP,bench)  ## Benchmark tables of this machine in bench_output/
	$(PY) -m cupyflash bench --output bench_output $(BENCH_ARGS)

numbers: $(call STAMP,numbers)  ## Measure on a GPU what README and docs show (20 minutes)
	$(PY) tools/measure_all.py $(NUMBERS_ARGS)

tables:  ## The tables of README.md, from benchmarks/results
	@$(PYTHON) tools/readme_tables.py

ci-install: $(call STAMP,ci)

clean:  ## Remove .venv and everything that was built
	rm -rf $(VENV) $(FLOORS) build dist *.egg-info demo_output bench_output docs/_build docs/generated \
	  docs/reference/generated .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
