# `make demo` shows Onward at work; `make test` proves it. Both need only Python 3.11+, git and make.
# Another Python: make test PYTHON=python3.13

PYTHON ?= python3
VENV ?= .venv
# Most tests wait, for a disk or for a process, so there may be more of them than cores.
PYTEST_ARGS ?= -n 4 --dist worksteal

BIN := $(VENV)/bin
# One stamp per set of extras: an install runs again only when pyproject.toml has changed.
USER_STAMP := $(VENV)/.installed-user
DEV_STAMP := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo venv test soak torture mutants coverage bench bench-peers lint format clean

help:
	@echo "make demo    a guided tour in a minute: jobs, a crash, a recovery"
	@echo "make test    every test, on SQLite and on PostgreSQL"
	@echo "make soak    the long tests: half an hour of load and faults"
	@echo "make torture BUDGET=3600 SEED=7   search for violations of what is promised"
	@echo "make mutants   small faults in decisions, store and leases: which does no test see?"
	@echo "make coverage  lines and branches that no test reaches"
	@echo "make bench   Onward beside the bare loop, on both databases: BENCH='S1 S3' for some"
	@echo "make bench-peers   the same workloads on other systems, installed for it"
	@echo "make lint    ruff, pyright and mypy"
	@echo "make format  ruff format, and the fixes ruff can make"
	@echo "make venv    only make $(VENV), with everything for development"
	@echo "make clean   remove $(VENV) and caches"

demo: $(USER_STAMP)
	@$(BIN)/onward demo

venv: $(DEV_STAMP)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

soak: $(DEV_STAMP)
	$(BIN)/python -m pytest -m "soak and not alone" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "soak and alone"

# Every search, on all cores, for BUDGET seconds; SEED repeats an earlier run.
BUDGET ?= 3600
torture: $(DEV_STAMP)
	$(BIN)/python -m tests.proof --budget $(BUDGET) $(if $(SEED),--seed $(SEED))

# Small faults put into decisions, store and leases, one at a time: which does no test see?
mutants: $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,dev,mutation]'
	$(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

# Which lines and branches does no test reach, in worker processes too?
coverage: $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,dev,coverage]'
	mkdir -p .coverage && rm -f .coverage/*
	-$(BIN)/coverage run -m pytest $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

bench: $(DEV_STAMP)
	$(BIN)/python -m benchmarks $(BENCH)

bench-peers: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.peers $(BENCH)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/mypy src benchmarks $(wildcard tests/typing)

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Onward needs Python 3.11 or newer, and \`$(PYTHON)\` is not: $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	  echo "Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv --clear $(VENV)

$(USER_STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing Onward into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all]'
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing Onward and its development tools into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,dev]'
	@touch $(USER_STAMP) $@
