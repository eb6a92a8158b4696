# Two commands on a fresh machine: `make demo` and `make test`. `make check` is the part of the tests for every save.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

.PHONY: demo test check lint format clean

# A task that copies some of its prompt, decoded without speculation and with it.
demo: $(READY)
	$(BIN)/lookfar compare "Rewrite this text in the past tense: The fox walks through the forest. The fox sees a river. The \
	fox walks to the river and drinks the water. The bear sees the fox and walks to the river too."

# Everything: linters, types, all tests; the demo model is downloaded on first use.
test: lint
	$(PYTEST)

# Under a minute on two cores, without the demo model.
check: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(PYTEST) -m "not slow and not real"

lint: $(READY)
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

# torch first and by exact version: a looser request may bring another build with it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
