# The entry for people. `make help` lists what there is; `make demo` and `make test` need nothing set up before.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
# Wheels carry no bytecode, and compiling PyTorch at every start takes seconds: it is kept, apart from the sources.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
UV_VERSION := 0.13.8
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
LOCKS := requirements/operator.txt requirements/trainer.txt requirements/build.txt requirements/examples.txt requirements/dev.txt
CLUSTER := PYTHONPATH=deploy/dev/cluster $(PY) -m local_cluster
LAB := PYTHONPATH=deploy/dev/lab:deploy/dev/cluster $(PY)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(UV):
	@./deploy/dev/setup-python.sh "$(PYTHON)" $(VENV) $(UV_VERSION)

$(VENV)/.installed: $(UV) requirements/dev.txt pyproject.toml
	@echo "==> Python packages"
	@$(UV) pip install --quiet --python $(PY) --require-hashes -r requirements/dev.txt
	@$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation -e .
	@touch $@

setup: $(VENV)/.installed ## Python environment with everything locked

lock: $(UV) ## resolve pyproject.toml into requirements/*.txt
	@for part in operator trainer; do \
	  $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url --extra $$part pyproject.toml -o requirements/$$part.txt; done
	@$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url --group build -o requirements/build.txt
	@$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url --extra trainer --extra tensorboard --group examples pyproject.toml -o requirements/examples.txt
	@$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url --extra operator --extra trainer --extra tensorboard --extra cli --group examples --group dev pyproject.toml -o requirements/dev.txt

lint: setup ## ruff, mypy, import-linter
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache

.PHONY: lint-prose
lint-prose: setup ## README, docs and the CRD's texts: length of lines and sentences, words of docs/glossary.md, habits
	@PYTHONPATH=deploy/dev/prose $(PY) -m prose_lint

format: setup ## let ruff rewrite what it can
	@$(VENV)/bin/ruff check --fix-only --quiet . ; $(VENV)/bin/ruff format --quiet .

crds: setup ## the CRD from the operator's models, into crds/ and the chart
	@mkdir -p crds helm/heterotrain/files
	@$(PY) -m heterotrain_operator.api.crd > crds/heterotrain.dev_heterotrainjobs.yaml
	@cp crds/heterotrain.dev_heterotrainjobs.yaml helm/heterotrain/files/

test-unit: setup ## fast tests without a cluster, some two minutes
	@$(VENV)/bin/pytest -q -n auto --maxprocesses 4 tests/unit tests/shell tests/packaging

test-distributed: setup ## several real training processes, with faults
	@$(VENV)/bin/pytest tests/distributed -q

test-cuda: setup ## what needs a GPU; not part of `make test`
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("test-cuda needs a GPU that PyTorch can use, and finds none (torch.cuda.is_available() is false): run it on a machine with an NVIDIA GPU and its driver")'
	@$(VENV)/bin/pytest tests/cuda -q

test: setup ## every tier, from lint to end-to-end on a real cluster; does all set-up itself
	@./deploy/dev/test-all.sh

# cluster
images: setup ## build the operator's and the trainer's image
	@$(CLUSTER) images build

cluster: setup ## start the emulated cluster (kind where a Docker engine runs) and load the images
	@$(CLUSTER) up
	@$(CLUSTER) images load

cluster-running: setup # for those that are content with a cluster that runs already
	@$(CLUSTER) up --reuse
	@$(CLUSTER) images load

cluster-down: setup ## stop it and leave nothing behind
	@$(CLUSTER) down

demo: cluster-running ## the main job on a real cluster, from nothing to a table and a picture
	@$(LAB) -m lab.demo

bench: cluster-running ## measure what docs/benchmarks.md quotes, each beside its alternative
	@$(LAB) -m lab.bench

bench-prediction: cluster-running ## how well step times of shares that were never used are predicted, on the cluster
	@$(LAB) -m lab.prediction

bench-convergence: cluster-running ## time to an accuracy on the cluster: even, adaptive and learned shares, three seeds
	@$(LAB) -m lab.convergence

bench-scale: setup ## the operator with 1,000 jobs and 10,000 pods on simulated nodes, a crash and a hand-over; no root, about ten minutes
	@$(LAB) -m lab.scale

bench-mathematics: setup ## how long the decisions take, and after how many epochs shares are right
	@$(PY) deploy/dev/bench/mathematics_timings.py

bench-trainer: setup ## the trainer's costs on this machine, beside DDP, torch.save, torchrun and torchft (TORCHFT=its python)
	@$(PY) deploy/dev/bench/trainer_overhead.py; echo
	@$(PY) deploy/dev/bench/trainer_pauses.py $(if $(TORCHFT),--torchft $(TORCHFT)); echo
	@$(PY) deploy/dev/bench/trainer_checkpoint.py; echo
	@$(PY) deploy/dev/bench/trainer_state.py --mb 300; echo
	@$(PY) deploy/dev/bench/trainer_donors.py; echo
	@$(PY) deploy/dev/bench/trainer_wire.py

bench-simulated: setup ## the simulated tables of docs/simulation.md, about twenty minutes
	@for what in model_error spot fleet comparison; do $(PY) deploy/dev/bench/simulated_$$what.py; echo; done

.PHONY: test-cuda bench-trainer bench-prediction bench-convergence bench-mathematics bench-simulated help setup lock lint format test test-unit test-distributed images cluster cluster-running cluster-down demo bench
