# make train   environment, then the default model on the standard library's source, on this machine
# make test    environment, then the whole test suite
# make lint    ruff, mypy, import-linter
# make sanitize    the CPU kernel on random problems, under the compiler's sanitizers of memory and threads
# Variables: PYTHON (3.10 or newer) makes the environment in VENV; ARGS goes to the command.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/lm/stdlib-linear-rope.yaml
JOBS ?= 2

.PHONY: train test test-fast sanitize lint format clean

train: $(VENV)/.run
	$(BIN)/lin-attn fit -c $(CONFIG) $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

sanitize: $(VENV)/.dev
	$(BIN)/python -m pytest -s tests/kernels/test_sanitizers.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two environments in one folder: training needs no linters. constraints.txt holds what was tested; torch comes first, so
# that no other package asks for a newer one.
$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit('lin-attn needs Python 3.10 or newer, got ' + sys.version) if sys.version_info < (3, 10) else None"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
