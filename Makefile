# dcpfs: `make demo` shows the main job, `make test` proves it. Both set up everything they need in .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
PYTEST_ARGS ?=
# Debian's packages of servers that the tests start by themselves, on loopback and on configurations of their own.
SERVERS := openssh-server nginx-light samba
# Test processes; each starts its own servers.
JOBS ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test missing nightly lint format typecheck bench setup servers clean

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
	@# Servers of the operating system, by root, and only where installing one does not start it as a service (in a
	@# container). Elsewhere `make servers` asks for them by name; without them, their tests say so and are skipped.
	-@if [ "$$(id -u)" = 0 ] && [ -x /usr/sbin/policy-rc.d ] && ! /usr/sbin/policy-rc.d; then \
	  $(MAKE) --no-print-directory servers || echo "Servers of the operating system: not installed"; fi
	touch $(STAMP)

servers:
	@PATH="$$PATH:/usr/sbin"; for each in sshd nginx smbd; do command -v $$each >/dev/null || missing=1; done; \
	if [ -n "$$missing" ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -qq --no-install-recommends $(SERVERS) >/dev/null; fi

demo: $(STAMP)
	$(BIN)/dcpfs demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not nightly" $(PYTEST_ARGS)

# Says which servers the tests did not find on this machine. With TESTS_REQUIRE=wheels or all, those tests fail.
missing: $(STAMP)
	@$(BIN)/python -m tests.conformance.servers_here

nightly: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist load --maxschedchunk 1 -m nightly -rP $(PYTEST_ARGS)

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
