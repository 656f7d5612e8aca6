# Needs Python 3.11 to 3.13, a C++ compiler and a package index; sets up the rest itself, in .venv.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
QUESTION ?= What is the capital of France?
ARGS ?=# more arguments for quire serve
PIP_ARGS ?=# more arguments for pip, for example --index-url URL
GPUS := $(wildcard /dev/nvidiactl /dev/kfd /dev/dxg)
WORKERS ?= 2# test files that run side by side
SECONDS ?= 600# that `make cuts` runs

export PYTHONDONTWRITEBYTECODE :=# where it is set, every process that starts compiles torch again, for seconds
BIN := $(VENV)/bin
INSTALL := $(BIN)/python tools/install.py
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
TRITON := triton==3.6.0# for the tests in its interpreter, where torch's build has not brought its own
MODEL_STAMP := $(VENV)/.model
CLIENTS := .venv-clients# one environment for each extra with clients, on top of $(VENV)
CLIENT_FAULTS := -W ignore::pytest.PytestUnraisableExceptionWarning# clients that leave their event loops open
CODE := setup.py tools src tests benchmarks examples
LONG := $(addprefix tests/,browser clients families parity engine/test_groups.py engine/test_hybrid.py engine/test_prefill_scratch.py \
  $(addprefix http/test_,deaths.py disaggregation.py guides.py hostile_grammars.py processes.py ranks.py ray_serve.py replicas.py schemathesis.py) \
  $(addprefix unit/,kernels/native/test_emulated_paths.py kernels/native/test_paths.py kernels/triton/test_compiling.py runtime/executor runtime/parallel \
  runtime/worker/test_prefill_scratch.py runtime/worker/test_prepare.py runtime/worker/test_stage_graphs.py runtime/worker/test_windows.py serving/process/test_supervisor.py serving/test_coming_from.py))
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ON_CPU = QUIRE_TEST_DEVICE=$(or $(QUIRE_TEST_DEVICE),cpu) $(PYTEST)
# Where there is a GPU, tests of models and kernels run on it too, unless QUIRE_TEST_DEVICE names the one device.
ON_GPU = $(and $(GPUS),$(if $(QUIRE_TEST_DEVICE),,yes))
GPU_TESTS := $(addprefix tests/,engine kernels unit/kernels unit/runtime)
BUILT_FROM := pyproject.toml setup.py constraints.txt src/quire/kernels/native/paths.py src/quire/serving/router/native.py \
  $(wildcard $(addprefix src/quire/,kernels/native/*.cpp kernels/native/*.h serving/router/*.cpp serving/router/*.h))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup serve demo test test-long test-clients check format bench soak kills cuts parity lm-eval families compile-kernels sanitize clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(DEV_STAMP) ## make .venv with everything needed to run, test and check

serve: $(MODEL_STAMP) ## set up and serve the default model: OpenAI's API and a playground (ARGS="--port 9000")
	@$(BIN)/quire serve --admin --show-admin-key $(ARGS)

demo: $(MODEL_STAMP) ## set up and answer one question (QUESTION="...")
	@$(BIN)/quire chat "$(QUESTION)"

test: $(DEV_STAMP) $(MODEL_STAMP) ## run the tests, all but those of `make test-long`
	$(ON_CPU) $(addprefix --ignore=,$(LONG))
	$(if $(ON_GPU),$(PYTEST) $(addprefix --ignore=,$(LONG)) $(GPU_TESTS))

test-long: $(DEV_STAMP) $(MODEL_STAMP) ## run the rest: model families, parity, browser, clients, guides, attacks, several processes and ranks
	$(ON_CPU) $(LONG)
	$(if $(ON_GPU),$(PYTEST) $(filter tests/families tests/parity tests/engine/% tests/unit/kernels/% tests/unit/runtime/%,$(LONG)))

test-clients: $(CLIENTS)/clients/.installed $(CLIENTS)/clients-openai2/.installed $(MODEL_STAMP) ## run other projects' clients against the server, npm's too where npm is
	! command -v npm >/dev/null || (cd tests/clients/javascript && npm install --no-package-lock --no-fund --no-audit)
	$(CLIENTS)/clients/bin/python -m pytest -q $(CLIENT_FAULTS) tests/clients
	$(CLIENTS)/clients-openai2/bin/python -m pytest -q $(CLIENT_FAULTS) tests/clients/test_litellm.py tests/clients/test_llama_index.py tests/clients/test_recipes.py

check: $(DEV_STAMP) ## lint, formatting, types, architecture
	$(BIN)/ruff check $(wildcard $(CODE))
	$(BIN)/ruff format --check $(wildcard $(CODE))
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -q tests/architecture; tests=$$?; wait $$types && exit $$tests

format: $(DEV_STAMP) ## rewrite the code in the house's format
	$(BIN)/ruff check --fix $(wildcard $(CODE))
	$(BIN)/ruff format $(wildcard $(CODE))

bench: $(DEV_STAMP) $(MODEL_STAMP) ## measure the engine's own cost, KV waste and speed on this machine
	$(BIN)/python -m benchmarks.control_plane
	$(BIN)/python -m benchmarks.kv_waste
	$(BIN)/python -m benchmarks.cpu --quick

soak: $(DEV_STAMP) $(MODEL_STAMP) ## the long runs: attacks, kills, cut connections, crowds (an hour and a half, wants a quiet machine)
	QUIRE_SOAK_SEQUENCES=2000 $(BIN)/python -m pytest --soak -q -s tests/soak tests/http/test_streams.py
	QUIRE_TEST_SEEDS=10000 $(BIN)/python -m pytest -q tests/engine/test_decoding_fuzz.py
	QUIRE_TEST_SEEDS=30 $(BIN)/python -m pytest -q -n $(WORKERS) tests/families/test_combinations.py
	QUIRE_TEST_CUTS=10000 $(BIN)/python -m pytest -q tests/unit/serving/text/test_random_cuts.py
	$(BIN)/python -m pytest --soak -q -m hypothesis tests/unit

kills: $(DEV_STAMP) $(MODEL_STAMP) ## kill -9 of the engine 20 times under load, and requests that kill it: who is answered
	$(BIN)/python -m pytest --soak -q -s tests/soak/test_engine_kills.py tests/http/test_deaths.py

cuts: $(DEV_STAMP) $(MODEL_STAMP) ## 64 streams with random cuts (SECONDS=600): no server error, no stream that differs
	QUIRE_SOAK_SECONDS=$(SECONDS) $(BIN)/python -m pytest --soak -q -s tests/soak/test_cut_streams.py

parity: $(DEV_STAMP) $(MODEL_STAMP) ## compare the default model with transformers over the whole matrix (long)
	QUIRE_TEST_WHOLE=1 $(BIN)/python -m pytest -q tests/parity

lm-eval: $(CLIENTS)/lm-eval/.installed $(MODEL_STAMP) ## score a task by lm-eval over the server and by transformers: both must agree (ARGS="--limit 10")
	PYTHONPATH=src $(CLIENTS)/lm-eval/bin/python -m benchmarks.lm_eval_parity $(ARGS)

families: $(DEV_STAMP) ## print the table of model families and the engine's features, each against transformers, and run their tests on every backend
	$(BIN)/python -m tests.families.matrix
	QUIRE_TEST_WHOLE=1 $(BIN)/python -m pytest -q --ignore tests/families/test_matrix.py tests/families

compile-kernels: $(DEV_STAMP) ## compile each Triton kernel that the kernel tests launch for an H200, without a GPU
	QUIRE_TEST_COMPILE=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist load tests/kernels

sanitize: $(DEV_STAMP) ## run the CPU kernels and the router's compiled code under GCC's address, undefined and thread sanitizers, built apart (ARGS="--path portable --only thread")
	$(BIN)/python tools/sanitize.py $(ARGS)

clean: ## remove the virtual environment, caches and build outputs
	rm -rf $(VENV) $(CLIENTS) tests/clients/javascript/node_modules build dist src/*.egg-info src/quire/kernels/native/*.so src/quire/serving/router/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 was found; install one or run make PYTHON=/path/to/python"; exit 1; }
	@echo "making $(VENV) with $(PYTHON) ..."
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): $(BUILT_FROM) | $(BIN)/python
	@$(INSTALL) server $(PIP_ARGS)
	@touch $@

$(DEV_STAMP): $(BUILT_FROM) | $(BIN)/python
	@$(INSTALL) dev $(PIP_ARGS)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) $(TRITON)
	@touch $@ $(RUN_STAMP)

# Packages of $(VENV) are found behind those of the extra, so that clients may need other versions than the server.
$(CLIENTS)/%/.installed: $(DEV_STAMP)
	@$(BIN)/python -m venv $(@D)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/quire.pth
	@$(BIN)/python -c 'import tomllib; from pathlib import Path; project = tomllib.loads(Path("pyproject.toml").read_text()); \
		print(*project["project"]["optional-dependencies"]["$*"], sep="\n")' > $(@D)/requirements.txt
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r $(@D)/requirements.txt
	@touch $@

$(MODEL_STAMP): $(RUN_STAMP)
	@$(BIN)/quire pull
	@touch $@
