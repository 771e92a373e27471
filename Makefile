# jaxret: `make` lists the targets. Everything installs into $(VENV) from the lock files, with hashes.
#   make test PYTHON=python3.12     another Python, in another environment (.venv-python3.12)
#   make test ARGS="-k tokenizer"   arguments for pytest

PYTHON ?= python3
VENV ?= $(if $(filter python python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
ARGS ?=
UPGRADE ?=

RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip -qq --disable-pip-version-check install
# conftest.py orders the files: the long ones come early, so that the last file leaves no process idle for minutes.
PYTEST := $(RUN) pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# Without bytecode, each process that a test starts compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: accelerator bench help demo test test-slow test-exhaustive test-faults fuzz test-plan check docs format lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Huge pages (glibc only, ignored elsewhere): large steps on a CPU otherwise spend time on page faults.
demo: $(VENV)/.ready ## train, encode, search and evaluate on the built-in text: minutes on two cores
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(RUN) jaxret demo --workdir=runs/demo

test: $(VENV)/.ready-dev ## the test suite, in at most ten minutes on two cores
	$(PYTEST) -m "not slow and not exhaustive" $(ARGS)

test-slow: $(VENV)/.ready-dev ## the tests of some seconds each: training runs, several processes, other cases of tables
	$(PYTEST) -m "slow and not exhaustive" $(ARGS)

test-exhaustive: $(VENV)/.ready-dev ## the long tests: every family and encoder; every recipe; two hosts; every fault
	$(PYTEST) -m exhaustive --dist load $(ARGS)

test-faults: $(VENV)/.ready-dev ## the tests that nothing is lost after kills, flipped bits, full disks, ...; prints a table
	$(PYTEST) -m faults --dist load $(ARGS)

fuzz: $(VENV)/.ready-dev ## many new generated files and texts (JAXRET_FUZZ=few: those of make test)
	JAXRET_FUZZ=$${JAXRET_FUZZ:-many} $(PYTEST) tests/fuzz $(ARGS)

test-plan: .venv-plan/.ready-plan ## compile for absent chips: bounds on memory and communication
	.venv-plan/bin/python -m pytest -q -n 2 --dist load -m exhaustive tests/plan $(ARGS)

check: $(VENV)/.ready-dev ## lint, format, types, import layers, names and docstrings
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	$(VENV)/bin/python $(VENV)/bin/lint-imports
	$(VENV)/bin/python tests/lint/house.py

accelerator: $(VENV)/.ready ## on a GPU or TPU machine: compares the numbers of `jaxret plan` with measured ones, in ten minutes
	$(VENV)/bin/python bench/accelerator.py --out=runs/accelerator $(ARGS)

bench: $(VENV)/.ready-dev ## compares jaxret with other libraries on this machine (requirements-bench.txt); ARGS="--compare=OLD.json" prints what became slower
	$(VENV)/bin/python bench/all.py $(ARGS)

docs: $(VENV)/.ready-dev ## the documentation as a site in build/docs, without a network; a warning is an error
	$(VENV)/bin/python docs/generate.py
	$(RUN) sphinx --quiet --fail-on-warning --keep-going docs build/docs

format: $(VENV)/.ready-dev ## rewrite the code in the house style
	$(RUN) ruff check --fix
	$(RUN) ruff format

# It keeps the locked versions, unless there is an option: make lock UPGRADE=--upgrade, or UPGRADE="--upgrade-package jax".
# One lock is for Python 3.11 and newer on Linux and macOS; if a package no longer supports 3.11, it lists two versions.
COMPILE := .venv-lock/bin/uv --quiet --no-config pip compile --universal --python-version 3.11 \
	--fork-strategy requires-python --generate-hashes --no-emit-index-url --custom-compile-command "make lock" $(UPGRADE)
lock: .venv-lock/bin/uv ## write the lock files again after a change in requirements*.txt
	$(COMPILE) requirements.txt --output-file requirements.lock
	$(COMPILE) requirements-dev.txt --constraints requirements.lock --output-file requirements-dev.lock

clean: ## remove the environments and caches (runs/ stays)
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than the files it depends on, so set-up runs again only when one of them changes.
PACKAGE := pyproject.toml requirements-base.txt requirements-data.txt requirements-demo.txt
define install
	@echo "Installing $(1) into $(VENV) (a minute or two, about 1.2 GB) ..."
	@$(PIP) --require-hashes -r $(1)
	@$(PIP) --require-hashes --no-deps -r requirements-demo.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@
endef

$(VENV)/.ready: requirements.lock $(PACKAGE) | $(VENV)/bin/python
	$(call install,requirements.lock)

$(VENV)/.ready-dev: requirements-dev.lock $(PACKAGE) | $(VENV)/bin/python
	$(call install,requirements-dev.lock)
	@touch $(VENV)/.ready

.venv-plan/.ready-plan: requirements-dev.lock requirements-plan.txt $(PACKAGE)
	@$(MAKE) --no-print-directory VENV=.venv-plan .venv-plan/.ready-dev
	@echo "Installing requirements-plan.txt into .venv-plan (another 2.3 GB) ..."
	@.venv-plan/bin/python -m pip -qq --disable-pip-version-check install -r requirements-plan.txt
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "jaxret needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1): name a newer one, as in" \
	"make test PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }

.venv-lock/bin/uv:
	@$(PYTHON) -m venv --clear .venv-lock
	@.venv-lock/bin/python -m pip -qq --disable-pip-version-check install uv==0.13.9
