# The two commands of the README are `make train` and `make test`; each sets up .venv when it has to.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation -c constraints.txt
DISTRIBUTIONS := requirements.txt pyproject.toml setup.py constraints.txt $(wildcard plugins/*/pyproject.toml)

.PHONY: train sft gpu test test-full test-zoo golden test-versions test-wheels lint types docs check clean

# What training needs, and what tests, lint and types need beside it.
.venv/trains: $(DISTRIBUTIONS)
	@echo "Installing torch, transformers and meshwright into .venv: a few minutes, most of them for torch."
	$(PYTHON) -m venv .venv
	$(INSTALL) 'setuptools>=77'
	$(INSTALL) -r requirements.txt
	touch $@

.venv/installed: .venv/trains
	@echo "Installing what tests, lint and types need."
	$(INSTALL) -e '.[dev]' -r requirements.txt
	touch $@

train: .venv/trains
	@echo "Training 300 steps on four ranks."
	$(BIN)/meshwright train examples/stdlib.yaml
	$(BIN)/python examples/load_with_transformers.py runs/stdlib

# An adapter that answers questions, on the model of `make train`.
sft: .venv/trains
	$(INSTALL) -e '.[data,peft]'
	test -d runs/stdlib/model || $(MAKE) train
	$(BIN)/meshwright train examples/sft.yaml
	$(BIN)/python examples/ask.py runs/sft 'What does os.path.join do?'

# What this machine's GPU shows, in eight minutes; gpu/gpu.json has the results, docs/reference/proofs/gpu.md says of what.
gpu: .venv/trains
	$(INSTALL) -e '.[peft]' pytest
	$(BIN)/python benchmarks/gpu/all.py --out gpu

# Three tiers by the markers `slow` and `zoo`; PART=2/20 makes it the third of twenty parts.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(PART),--part=$(PART))

test: .venv/installed
	$(PYTEST) -m "not slow and not zoo"

test-full: .venv/installed
	$(PYTEST) -m "not zoo"

test-zoo: .venv/installed
	$(PYTEST) -m zoo

# Losses, gradient norms and weights, bit for bit as they were recorded.
golden: .venv/installed
	$(BIN)/python tests/golden/compare_golden.py

test-versions: .venv/installed
	$(BIN)/python tests/run_version_matrix.py

# Each plugin from its wheel, alone with core, in an environment of its own.
test-wheels: .venv/installed
	$(BIN)/python tests/run_wheel_tests.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy
	MYPYPATH=tests $(BIN)/mypy tests/support/buggy_strategies.py  # strategies of users override the same methods

# The site, into build/site; a link that leads nowhere is an error (but not with --quiet, which hides warnings).
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

check: lint types test

clean:
	rm -rf .venv .versions runs
