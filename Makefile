# The entry point for people. `make help` lists the targets; `make demo` and `make test` need no preparation.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
# Wheels come without bytecode, and compiling PyTorch at every start takes seconds: keep bytecode in the environment.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 \
  --generate-hashes --no-header --no-annotate --no-emit-index-url
INSTALL := $(UV) pip install --quiet --python $(PY)
PYTEST := $(VENV)/bin/pytest -q
PARALLEL := -n auto --maxprocesses 4
WITHOUT_PYTORCH := heterotrain_core heterotrain_planner heterotrain_operator heterotrain_cli heterotrain_client heterotrain_simulator heterotrain_simulate local_cluster lab
CLUSTER := PYTHONPATH=deploy/dev/cluster $(PY) -m local_cluster
LAB := PYTHONPATH=deploy/dev/lab:deploy/dev/cluster $(PY)

##@ Start here

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: cluster-running ## run the main job on a real cluster; prints a table and draws a picture
	@$(LAB) -m lab.demo

# PART= names one or more parts, ARGS= more arguments of pytest; deploy/dev/lab/lab/testing/parts.py is the table.
LIGHT_PARTS := core planner cli research comparisons docs
OPERATOR_PARTS := operator lab packaging chaos
PARTS_NEED = $(if $(PART),$(if $(filter-out $(LIGHT_PARTS),$(PART)),$(if $(filter-out $(LIGHT_PARTS) $(OPERATOR_PARTS),$(PART)),setup,setup-operator),setup-core),setup)
TESTING := $(LAB) -m lab.testing

check: ## lint, unit and shell tests, three minutes on two cores; PART="operator" is shorter and needs no PyTorch
	@$(MAKE) --silent --no-print-directory $(PARTS_NEED)
	@$(TESTING) check $(if $(PART),lint $(PART)) -- $(ARGS)

test: ## check, then distributed tests next to those on a real cluster; PART="distributed" is one part of it
	@$(MAKE) --silent --no-print-directory $(PARTS_NEED)
	@$(TESTING) gate $(PART) -- $(ARGS)

test-all: ## everything that needs no GPU, with many seeds and histories; hours. PART=stores is one part of it
	@$(MAKE) --silent --no-print-directory $(PARTS_NEED)
	@$(TESTING) all $(PART) -- $(ARGS)

##@ Python environment (each target installs what it needs; VENV=folder chooses another environment)

$(UV):
	@./deploy/dev/setup-python.sh "$(PYTHON)" $(VENV) requirements/build.txt

# The three lists are nested and hold the same versions, so a larger one adds packages to a smaller one. Each list has
# a stamp; a larger list touches the stamps of the smaller ones.
define install
@echo "==> Python packages of requirements/$(1)"
@$(INSTALL) --require-hashes -r requirements/$(1)
@$(INSTALL) --no-deps --no-build-isolation -e .
endef

$(VENV)/.installed-core: requirements/dev-core.txt pyproject.toml | $(UV)
	$(call install,dev-core.txt)
	@touch $@

$(VENV)/.installed-operator: requirements/dev-operator.txt pyproject.toml | $(UV)
	$(call install,dev-operator.txt)
	@touch $@ $(VENV)/.installed-core

$(VENV)/.installed: requirements/dev.txt pyproject.toml | $(UV)
ifdef TORCH_INDEX
	@echo "==> PyTorch from $(TORCH_INDEX)"
	@$(INSTALL) --no-deps --index-url $(TORCH_INDEX) "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/dev.txt)"
	@echo "==> Python packages of requirements/dev.txt, without CUDA"
	@awk '/^[a-z0-9]/ {skip = /^(torch==|triton==|nvidia-[^m]|cuda-)/} !skip' requirements/dev.txt > $(VENV)/without-cuda.txt
	@$(INSTALL) --no-deps --require-hashes -r $(VENV)/without-cuda.txt
	@$(INSTALL) --no-deps --no-build-isolation -e .
else
	$(call install,dev.txt)
endif
	@touch $@ $(VENV)/.installed-operator $(VENV)/.installed-core

setup-core: $(VENV)/.installed-core ## packages for work on the core and the command line

setup-operator: $(VENV)/.installed-operator ## the same and packages for work on the operator; no PyTorch

setup: $(VENV)/.installed ## all packages; TORCH_INDEX=address takes PyTorch from an index of its own

# The constraint gives images and smaller environments the versions that all tests run with.
lock: $(UV) ## resolve pyproject.toml into requirements/*.txt
	@$(COMPILE) --extra operator --extra trainer --extra tensorboard --extra cli --extra export --group examples \
	  --group dev pyproject.toml -o requirements/dev.txt
	@$(COMPILE) -c requirements/dev.txt --extra cli --group dev-core pyproject.toml -o requirements/dev-core.txt
	@$(COMPILE) -c requirements/dev.txt --extra operator --extra cli --group dev-operator \
	  pyproject.toml -o requirements/dev-operator.txt
	@$(COMPILE) -c requirements/dev.txt --extra operator pyproject.toml -o requirements/operator.txt
	@$(COMPILE) -c requirements/dev.txt --extra trainer pyproject.toml -o requirements/trainer.txt
	@$(COMPILE) -c requirements/dev.txt --extra trainer --extra tensorboard --group examples \
	  pyproject.toml -o requirements/examples.txt
	@awk '/^[a-z0-9]/ {skip = /^(torch==|triton==|nvidia-[^m]|cuda-)/} !skip' requirements/dev.txt > $(VENV)/without-cuda.txt
	@$(COMPILE) -c $(VENV)/without-cuda.txt -c requirements/cu12.in --extra trainer \
	  pyproject.toml -o requirements/trainer-cu12.txt
	@$(COMPILE) -c $(VENV)/without-cuda.txt -c requirements/cu12.in --extra trainer --extra tensorboard --group examples \
	  pyproject.toml -o requirements/examples-cu12.txt
	@$(COMPILE) -c requirements/dev.txt --extra trainer --group guides pyproject.toml -o requirements/guides.txt
	@$(COMPILE) -c requirements/dev.txt --group build -o requirements/build.txt
	@$(COMPILE) --group go -o requirements/go.txt
	@$(COMPILE) --group stores -o requirements/stores.txt
	@$(COMPILE) --group docs -o requirements/docs.txt

##@ Style and generated files

lint: ## ruff, codespell, mypy, import-linter; in `make check`, as much as its parts have packages for
	@$(MAKE) --silent --no-print-directory $(PARTS_NEED)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/codespell
ifneq ($(PARTS_NEED),setup-core)
	@$(VENV)/bin/mypy $(if $(filter setup-operator,$(PARTS_NEED)),$(addprefix -p ,$(WITHOUT_PYTORCH)))
	@$(VENV)/bin/lint-imports --no-cache
endif

format: setup-core ## let ruff fix and format the sources
	@$(VENV)/bin/ruff check --fix-only --quiet . ; $(VENV)/bin/ruff format --quiet .

generate: setup-operator ## make every file that is made from others: CRD, references, chart's README, manifest
	@$(LAB) -m lab.generated

release: setup-core ## a whole release from the newest commit, pushed to loopback, and tried as a user; VERSION=0.1.0
	@$(LAB) -m lab.release_files $(or $(VERSION),$(error give VERSION, such as make release VERSION=0.1.0)) $(ARGS)

##@ Longer runs and packages for parts of `make test-all`

chaos: setup-operator ## seeded fault scenarios for the operator: HISTORIES=number, SEED=first one; about one second each
	@PYTHONPATH=core:planner:operator:cli:deploy/dev/lab:deploy/dev/cluster:tests $(PY) -m support.chaos \
	  --histories $(or $(HISTORIES),300) --seed $(or $(SEED),0)

histories: setup ## seeded histories of real workers: KIND=data, late, divided, unequal, sharded or layout, HISTORIES=number, SEED=first one
	@kind=$(or $(KIND),layout); first=$(or $(SEED),0); [ "$$kind" = data ] && part= || part=$${kind}_; \
	  HISTORIES="$$first:$$((first + $(or $(HISTORIES),20)))" $(PYTEST) -n 2 "tests/distributed/test_$${part}histories.py"

guides-packages: setup
	@awk '/^[a-z0-9]/ {skip = /^(torch==|triton==|nvidia-[^m]|cuda-)/} !skip' requirements/guides.txt > $(VENV)/guides.txt
	@$(INSTALL) --no-deps --require-hashes -r $(VENV)/guides.txt

$(VENV)/stores/.installed: requirements/stores.txt | $(VENV)/.installed
	@echo "==> Python packages of requirements/stores.txt, for tests of stores only"
	@$(INSTALL) --require-hashes --target $(VENV)/stores -r requirements/stores.txt
	@touch $@

stores-packages: $(VENV)/stores/.installed

OLDEST := $(VENV)-oldest-torch
oldest-torch: setup
	@test -x $(OLDEST)/bin/python || $(UV) venv --quiet --python $(PY) $(OLDEST)
	@awk '/^[a-z0-9]/ {skip = /^(torch==|triton==|nvidia-[^m]|cuda-)/} !skip' requirements/dev.txt > $(OLDEST)/rest.txt
	@$(UV) pip install --quiet --python $(OLDEST)/bin/python --require-hashes -r requirements/trainer-cu12.txt
	@$(UV) pip install --quiet --python $(OLDEST)/bin/python --no-deps --require-hashes -r $(OLDEST)/rest.txt
	@$(UV) pip install --quiet --python $(OLDEST)/bin/python --no-deps --no-build-isolation -e .
	@REPEAT=gate $(OLDEST)/bin/pytest -q $(PARALLEL) tests/unit/trainer
	@REPEAT=gate $(OLDEST)/bin/pytest -q tests/distributed

$(VENV)/docs/.installed: requirements/docs.txt | $(VENV)/.installed
	@echo "==> Python packages of requirements/docs.txt, for docs only"
	@$(INSTALL) --require-hashes --target $(VENV)/docs -r requirements/docs.txt
	@touch $@

docs: setup $(VENV)/docs/.installed ## the documentation site, into out/site; fails on dead links
	@PYTHONPATH=$(VENV)/docs $(PY) -m sphinx -q -W --keep-going -c deploy/dev/site -d out/doctrees . out/site
	@echo out/site/index.html

gpu: $(if $(GPU_PYTHON),,setup) ## all that needs a GPU, in nine minutes, one table last: the gate's proof, costs of a step, mixed speeds, tests/cuda
	@$(or $(GPU_PYTHON),$(PY)) deploy/dev/bench/gpu.py $(ARGS)

##@ Emulated cluster (kind where a Docker engine runs, otherwise real components as root)

images: setup ## build the images of operator and trainer
	@$(CLUSTER) images build

cluster: setup ## start the cluster and load the images
	@$(CLUSTER) up
	@$(CLUSTER) images load

cluster-running: setup # like `cluster`, but a running cluster is fine
	@$(CLUSTER) up --reuse
	@$(CLUSTER) images load

cluster-down: setup ## stop the cluster; leaves no process, mount or interface behind
	@$(CLUSTER) down

operator-local: setup-operator ## run the operator from the sources in place of the installed one, until Ctrl-C
	@PYTHONPATH=deploy/dev/lab:deploy/dev/cluster deploy/dev/operator-local.sh $(PY) $(ARGS)

operator-reload: setup-operator ## rebuild the operator's image, load it into the nodes and roll it out
	@$(CLUSTER) images load
	@$(LAB) -m lab.install

##@ Benchmarks (docs/benchmarks.md)

bench: cluster-running ## figures of the demo job on the cluster, each with its alternative
	@$(LAB) -m lab.bench

bench-scale: setup ## the operator with 1,000 jobs and 10,000 pods on simulated nodes; about ten minutes, no root
	@$(LAB) -m lab.scale

bench-mathematics: setup ## duration of decisions, and epochs until shares are right
	@PYTHONPATH=research $(PY) research/programs/mathematics_timings.py; $(PY) deploy/dev/bench/layout_timings.py

bench-trainer: setup ## the trainer's costs on this machine, next to DDP, torchrun and torchft (TORCHFT=python)
	@$(PY) deploy/dev/bench/trainer_overhead.py; echo
	@$(PY) deploy/dev/bench/trainer_pauses.py $(if $(TORCHFT),--torchft $(TORCHFT)); echo
	@$(PY) deploy/dev/bench/trainer_losses.py; echo
	@$(PY) deploy/dev/bench/unequal_shards.py

##@ Research: the simulator and published comparisons (neither in the wheel nor in an image)

research: setup-core ## their tests, and the table of published systems; a minute
	@$(PYTEST) $(PARALLEL) research/tests
	@PYTHONPATH=research $(PY) -m heterotrain_simulate --published

pictures: setup ## draw the pictures of docs/mathematics.md again
	@PYTHONPATH=research $(PY) research/programs/mathematics_pictures.py

bench-simulated: setup ## the tables of research/README.md; hours on one core
	@for what in spot fleet cannikin comparison; do PYTHONPATH=research $(PY) research/programs/simulated_$$what.py; echo; done

.PHONY: help demo check test test-all setup-core setup-operator setup lock lint format generate release docs chaos histories \
  guides-packages stores-packages oldest-torch gpu images cluster cluster-running \
  cluster-down operator-local operator-reload bench bench-scale bench-mathematics bench-trainer bench-simulated research pictures
