# Everything happens in .venv, made on first use with any Python >= 3.11: `make demo`, `make test`, `make lint`, `make bench`.
# Versions are those of constraints.txt, the ones that the tests have passed with.
PYTHON ?= $(shell for p in python3 python python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

.PHONY: demo test lint bench clean

demo: .venv/installed
	$(BIN)/convert demo

test: .venv/installed-test
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: .venv/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/write_docs.py --check

bench: .venv/installed
	$(BIN)/python benchmarks/convert_io.py

clean:
	rm -rf .venv kvfold-demo

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# pip's resolver is given the whole set at once, so that torch cannot be chosen apart from its constraint.
.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

.venv/installed-lint: .venv/installed
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet --constraint constraints.txt --editable '.[lint]'
	@touch $@
