# The two commands of the README are `make train` and `make test`; each sets up .venv when it has to.
PYTHON ?= python3
BIN := .venv/bin
PACKAGES := -e '.[all,dev]' -e plugins/fsdp2 -e plugins/ddp -e plugins/megatron_fsdp -e plugins/pipeline

.PHONY: train test test-versions lint types check clean

.venv/installed: pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PACKAGES)
	touch $@

train: .venv/installed
	$(BIN)/meshwright train examples/stdlib.yaml
	$(BIN)/python examples/load_back.py runs/stdlib

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-versions: .venv/installed
	$(BIN)/python tests/versions.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy
	$(BIN)/mypy tests/planted.py  # strategies of users override the same methods

check: lint types test

clean:
	rm -rf .venv .versions runs
