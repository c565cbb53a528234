# dcpfs: `make demo` shows the main job, `make test` proves it. Both set up everything they need in .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
PYTEST_ARGS ?=
# Test processes; each starts its own servers.
JOBS ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test nightly lint format typecheck bench setup clean

setup: $(STAMP)

# torch comes first, alone and by its exact version, so that no later range pulls a CUDA build.
$(STAMP): pyproject.toml constraints.txt dcpfs/_version.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=24"
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e ".[demo,test,lint,bench]"
	@# Azure's server is on npm only. Without it, its tests say so and are skipped.
	-@if command -v npm >/dev/null; then \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/node azurite@3.37.0 || echo "Azurite: not installed"; fi
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/dcpfs demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not nightly" $(PYTEST_ARGS)

nightly: $(STAMP)
	$(BIN)/python -m pytest -m nightly $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
