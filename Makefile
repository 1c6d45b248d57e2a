# kvferry's tasks. Each makes the virtual environment that it needs, once, and says what it does.
#
#   PYTHON   the Python to make the environment with (3.10 to 3.13; vLLM needs 3.11 or later)
#   VENV     where the environment is
#   ARGS     is passed on to the program that a task runs

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

BIN       := $(VENV)/bin
DEV       := $(VENV)/.kvferry-dev
VLLM      := $(VENV)/.kvferry-vllm
NOT_WIDE  := not wide
CORE_TESTS = --ignore=tests/vllm --ignore=tests/e2e

.PHONY: help demo up test test-core test-all lint sim matrix bench setup setup-dev clean clean-venv
.DEFAULT_GOAL := help

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VLLM) ## A prefill and a decode server exchange KV; ARGS='--tp-decode 2 --json FILE' and others are passed on
	@$(BIN)/kvferry demo $(ARGS)

up: $(VLLM) ## The demo's servers, serving an OpenAI API until Ctrl-C
	@$(BIN)/kvferry up $(ARGS)

test: lint $(VLLM) ## What CI runs: lint, the tests without servers, then those with real vLLM servers
	@echo "== tests without servers"
	@$(BIN)/pytest -n 2 -m "not e2e and $(NOT_WIDE)" $(ARGS)
	@echo "== tests with real servers"
	@$(BIN)/pytest -m "e2e and $(NOT_WIDE)" $(ARGS)

test-core: $(DEV) ## The tests of what needs no vLLM (also on Python 3.10)
	@$(BIN)/pytest -n 2 -m "not e2e and $(NOT_WIDE)" $(CORE_TESTS) $(ARGS)

test-all: test ## `make test`, then the wide matrices
	@echo "== wide matrices"
	@$(BIN)/pytest -m wide $(ARGS)

lint: $(DEV) ## ruff, mypy and the import contracts
	@echo "== ruff, mypy, import-linter"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "ruff format would change files: run '$(BIN)/ruff format'"; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports >/dev/null || $(BIN)/lint-imports

sim: $(DEV) ## The protocol simulator: 100,000 schedules; ARGS='--seed N' replays one
	@$(BIN)/python scripts/sim.py $(ARGS)

matrix: $(DEV) ## Every combination of splits and layouts between two processes; writes docs/matrix.md; ARGS='--only TEXT' runs some
	@$(BIN)/python scripts/matrix.py $(ARGS)

bench: $(VLLM) ## The measurements, one after another; ARGS is passed on to each
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file $(ARGS); done

setup: $(DEV) $(VLLM) ## Only make the environment

setup-dev: $(DEV) ## Only make the environment, without vLLM

$(DEV): pyproject.toml scripts/install
	@scripts/install $(VENV) $(PYTHON) dev
	@touch $@

$(VLLM): pyproject.toml scripts/install
	@scripts/install $(VENV) $(PYTHON) vllm
	@touch $@

clean: ## Remove caches and build output
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv: ## Remove the virtual environment
	rm -rf $(VENV)
