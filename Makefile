# Every target does its own set-up in .venv; nothing else has to be installed first but Python 3.11 with venv.
PYTHON ?= $(shell for p in /usr/bin/python3 python3; do $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# Most tests wait for other processes: two workers more than there are processors keep them all busy.
WORKERS := $(shell expr $$(nproc 2>/dev/null || echo 1) + 2)

.PHONY: setup demo test test-all test-vm check bench packages clean

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/elsewhere
	@test -n "$(PYTHON)" || { echo "elsewhere needs Python 3.11 or later with venv (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "setting up $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group dev
	@touch $@

packages:
	@scripts/system-packages

demo: setup
	@$(BIN)/python examples/demo.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup packages check
	$(BIN)/pytest -m "not slow" --numprocesses $(WORKERS) --dist worksteal

# The emulated machine needs all processors for itself.
test-all: setup packages
	$(BIN)/pytest -m slow --ignore tests/vm --numprocesses $(WORKERS) --dist load --maxschedchunk 1 --timeout 1200 --durations 25
	$(BIN)/pytest tests/vm

test-vm: setup packages
	$(BIN)/pytest tests/vm

bench: setup packages
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group bench
	@$(BIN)/python bench/compare.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist
