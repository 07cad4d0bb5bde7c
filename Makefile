# make serve   a virtual environment in .venv, and the demo model on this machine
# make test    what continuous integration runs: format, lint, types, spelling, tests
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
# Tests start hundreds of processes: each would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TYPING := $(VENV)/typing
NEWEST := $(VENV)/newest
NEWEST_TESTS := tests/parity tests/e2e/test_answers.py tests/gpu/fused tests/gpu/model

.PHONY: help serve test test-full test-newest test-clients test-ray test-faults audit lint types \
	format tables clean

help:
	@echo "make serve [ARGS=...]   serve the demo model, or: make serve ARGS='MODEL --lora-dir DIR'"
	@echo "make test               format, lint, types, spelling and tests, as CI runs them"
	@echo "make test-full          the same, and kernels on every lower level of instructions"
	@echo "make test-newest        parity, answers and kernels with the newest releases that are allowed"
	@echo "make test-clients       other projects' clients against corun serve, installed for it"
	@echo "make test-ray           clusters over Ray, which is installed for it: as root also partitions"
	@echo "make test-faults        attacks, full disks and kills beside streams: gaps and memory"
	@echo "make audit              known vulnerabilities of the pinned versions; needs a network"
	@echo "make lint | types       only these checks"
	@echo "make format             rewrite the code in the house format"
	@echo "make tables             rewrite the tables of the documentation that the code determines"
	@echo "make clean              remove $(VENV) and everything built"

serve: $(VENV)/.installed
	$(BIN)/corun serve $(ARGS)

test: lint types
	$(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder $(ARGS)

# Beside them, the same tests of kernels and answers on every lower level of instructions.
test-full: lint types
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --full $(ARGS)

# Without constraints, in an environment of its own: what `pip install corun` takes today.
test-newest:
	$(MAKE) --no-print-directory VENV=$(NEWEST) $(NEWEST)/bin/python
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check \
		--upgrade --upgrade-strategy eager -e '.[dev]'
	$(NEWEST)/bin/corun env
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder \
		$(NEWEST_TESTS) $(ARGS)

# Other projects' clients, unchanged, each in an environment of its own (tests/clients/README.md).
test-clients: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 0 --clients --timeout 2400 tests/clients $(ARGS)

# A head of Ray and three nodes on this machine, of which one thing after the other fails.
test-ray: $(VENV)/.installed-dev
	$(PIP_INSTALL) -e '.[ray]'
	$(BIN)/python -m pytest -n 0 --ray --timeout 600 tests/over_ray $(ARGS)

# One table: what each does to streams, to /health and to memory. As root in a control group, with
# mounts of its own. ARGS="--soak [MINUTES] [--soak-record FILE]" then loads a server for an hour.
test-faults: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 0 --faults --timeout 600 tests/faults $(ARGS)

# Of what is pinned alone: ranges are resolved by `make test-newest`.
audit: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	grep -E '^[A-Za-z0-9_.-]+==' constraints.txt > $(VENV)/audited.txt
	$(BIN)/pip-audit --requirement $(VENV)/audited.txt --no-deps --disable-pip --strict $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/typos

# The repository's root is the package, whatever its directory is called: mypy sees it through a
# link named corun. Tests and benchmarks import their shared parts from their own folders.
types: $(VENV)/.installed-dev
	mkdir -p $(TYPING)
	ln -sfn "$(CURDIR)" $(TYPING)/corun
	MYPYPATH=$(TYPING):tests:bench $(BIN)/mypy --num-workers 2 --explicit-package-bases \
		$(TYPING)/corun $(wildcard tests) $(wildcard bench)

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

tables: $(VENV)/.installed-dev
	PYTHONPATH=tests $(BIN)/python -P -m support.tables

clean:
	rm -rf $(VENV) build dist corun.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "corun needs Python 3.11 or newer; choose one with: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "python3 -m venv failed, trying with the pip of $(PYTHON)" >&2; \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; } || { \
		rm -rf $(VENV); \
		echo "cannot make $(VENV): install the venv module of $(PYTHON)" \
			"(Debian and Ubuntu: the package python3-venv)" >&2; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e .
	@touch $@

# pip would compile 17,000 modules in one process. Some of other packages cannot be compiled.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --no-compile -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true
	@touch $@ $(VENV)/.installed
