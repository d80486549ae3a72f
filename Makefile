# Every target sets up what it needs by itself: .venv in this folder, nothing global.

BIN := .venv/bin
# The console script, not `python -m pytest`: that would put this folder on the path, and `kernels` in it would hide
# Hugging Face's package of the same name from transformers.
PYTEST := $(BIN)/pytest
PYTEST_ARGS ?=
CONFIG ?= quickstart

.DEFAULT_GOAL := help
.PHONY: help install model quickstart test test-fast test-all chaos check check-format check-lint check-types fmt bench clean

help: ## This list
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

install: ## Set up .venv: engine, transports, splitserve, development tools
	@scripts/install.sh

model: install ## Prepare the small real model that the quickstart and the tests use (once per user)
	@$(BIN)/splitserve model prepare smollm2-135m

quickstart: model ## Bring up one prefill node, one decode node and the router; answer one chat; stop
	@$(BIN)/splitserve quickstart $(CONFIG)

test: model ## What CI runs: every test but the long matrices and those that need a GPU
	@PYTEST=$(PYTEST) scripts/test.sh -m "not gpu and not long" $(PYTEST_ARGS)

test-fast: install ## The tests that start no vLLM engine (minutes)
	@PYTEST=$(PYTEST) scripts/test.sh -m "not gpu and not engine and not long" $(PYTEST_ARGS)

test-all: model ## Every test, those that need a GPU too, then half an hour of chaos
	@PYTEST=$(PYTEST) scripts/test.sh $(PYTEST_ARGS)
	$(MAKE) chaos

chaos: install ## Torment a cluster of mock engines for 30 minutes and judge it (make chaos ARGS="--minutes 5")
	PYTHONPATH=tests $(BIN)/python -m chaos.run $(ARGS)

check: check-format check-lint check-types ## Format, lint and types; changes nothing

check-format: install
	$(BIN)/ruff format --check --output-format concise .

check-lint: install
	$(BIN)/ruff check .

check-types: install
	@scripts/link_types.sh
	$(BIN)/mypy

fmt: install ## Format, and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-%: model ## Run benchmarks/NAME.py (make bench-NAME ARGS="...")
	$(BIN)/python benchmarks/$(subst -,_,$*).py $(ARGS)

bench: ## List the benchmarks
	@ls benchmarks/*.py 2>/dev/null | sed -E 's,benchmarks/(.*)\.py,make bench-\1,' | tr _ -

clean: ## Remove what was made here, but for .venv and prepared models
	rm -rf build .mypy_cache .ruff_cache .pytest_cache
