# make demo    set up the environment and run the main job, examples/serving_loop.py
# make test    set up the environment and run the tests
# make help    the rest
#
# The environment is the folder $(VENV), made on first use from $(PYTHON) and constraints.txt.
# To use an environment that exists already, leave VENV empty:  make test PYTHON=python3 VENV=

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
# Tiers that must run in `make test`, comma-separated: what skips them fails it.
TIERS ?=

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# The stamp is written last, so an installation that was interrupted is done again.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV): the first time this fetches PyTorch and takes some minutes'
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev,docs]'
	@touch $@
endif

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format types docs compile-only tables tables-check gpu-test clean

help:
	@echo 'make demo           environment, then examples/serving_loop.py'
	@echo 'make test           environment, then the tests, on the CPU'
	@echo 'make test TIERS=flash,unfused  the same, failing if one of these tiers did not run'
	@echo 'make install        environment only'
	@echo 'make lint           ruff format --check, ruff check'
	@echo 'make format         rewrite the files as ruff would have them'
	@echo 'make types          mypy over the two packages'
	@echo 'make docs           the pages, into docs/_build/html; a warning is an error'
	@echo 'make compile-only   compile the Triton kernels for several GPUs; needs no GPU'
	@echo 'make tables         write the measured tables of README.md and docs/ from benchmarks/results'
	@echo 'make tables-check   fail if one of those tables differs from its result file'
	@echo 'make gpu-test       tests/gpu, on a machine with a GPU'
	@echo 'make clean          remove the environment and everything built'
	@echo 'PYTHON=python3 VENV= uses an existing environment instead of $(VENV)'

install: $(READY)

demo: $(READY)
	$(PY) examples/serving_loop.py

# One OpenMP thread for each worker: two workers with all cores each are slower than one.
test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --ignore=tests/gpu --ignore=tests/test_compile_only.py --require-tiers '$(TIERS)'

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

types: $(READY)
	$(PY) -m mypy

docs: $(READY)
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo 'docs/_build/html/index.html'

compile-only: $(READY)
	$(PY) -m pytest -q -n $(WORKERS) tests/test_compile_only.py

tables: $(READY)
	$(PY) benchmarks/render_tables.py

tables-check: $(READY)
	$(PY) benchmarks/render_tables.py --check

gpu-test: $(READY)
	$(PY) -m pytest -q tests/gpu --require-tiers flash,mea,unfused

# $(VENV) only if it is one that this Makefile made.
clean:
	if [ -n '$(strip $(VENV))' ] && [ -e '$(VENV)/.ready' ]; then rm -rf '$(VENV)'; fi
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .ci/logs
