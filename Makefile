# SPDX-License-Identifier: Apache-2.0
# Every target works on a fresh machine: it makes .venv with the tested versions first, and again when they change.
#   make demo | demo-accelerate | demo-lab | test | test-all | test-accelerate-versions | test-latest | lint
#        bench | bench-lab | clean                            PYTHON=python3.12 make test: another Python

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LATEST := $(VENV)-latest
ARGS   ?=

# Tests start several processes on one machine: more threads than cores make them slow, never faster.
export OMP_NUM_THREADS = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo demo-accelerate demo-lab test test-all test-accelerate-versions test-latest lint bench bench-lab clean
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp
	@$(BIN)/python recipes/lightning/pretrain_gpt.py --demo $(ARGS)

demo-accelerate: $(VENV)/.stamp
	@$(BIN)/accelerate launch --config recipes/accelerate/demo.yaml recipes/accelerate/pretrain_gpt.py $(ARGS)

# Two clusters on this machine, from network namespaces: needs root (sudo make demo-lab) and iproute2.
demo-lab: $(VENV)/.stamp
	@$(BIN)/python recipes/lab/demo.py $(ARGS)

test: $(VENV)/.stamp
	@$(BIN)/python -m pytest -q $(ARGS)

test-all: $(VENV)/.stamp
	@$(BIN)/python -m pytest -q -m "slow or not slow" $(ARGS)

# Accelerate from the oldest release that is supported to the newest that was tested (some minutes).
test-accelerate-versions: $(VENV)/.stamp
	@VENV=$(VENV) ARGS="$(ARGS)" tests/accelerate/versions.sh

# The newest releases of everything, without constraints.txt: tells early what breaks.
test-latest: $(LATEST)/.stamp
	@$(LATEST)/bin/python -m pip freeze --exclude-editable | grep -iE '^(torch|lightning|accelerate|transformers)=='
	@$(LATEST)/bin/python -m pytest -q $(ARGS)

lint: $(VENV)/.stamp
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(VENV)/.stamp
	@set -e; found=; for program in benchmarks/bench_*.py; do \
	  [ -f "$$program" ] || continue; found=1; echo "== $$program"; $(BIN)/python "$$program" $(ARGS); \
	done; [ -n "$$found" ] || { echo "make bench: there is no benchmarks/bench_*.py yet" >&2; exit 1; }

# Against DDP, FSDP2 and torch's pipelining in labs of network namespaces: a day; needs root and a quiet machine.
bench-lab: $(VENV)/.stamp
	@$(BIN)/python benchmarks/lab_throughput.py --out benchmarks/lab.md $(ARGS)

clean:
	rm -rf $(VENV) $(LATEST) $(VENV)-accelerate build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# -qq: pip says nothing but errors. The stamp is written last, so an interrupted installation is done again.
$(VENV)/.stamp: pyproject.toml constraints.txt
	@echo "holmes: installing the tested versions into $(VENV) (some minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

$(LATEST)/.stamp: pyproject.toml
	@echo "holmes: installing the newest versions into $(LATEST) (some minutes, once)"
	@$(PYTHON) -m venv $(LATEST)
	@$(LATEST)/bin/python -m pip install -qq -U --upgrade-strategy eager -e '.[dev]'
	@touch $@
