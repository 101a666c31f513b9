# `make help` lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := .cache/models/SmolLM2-135M-Instruct
PROTOS := $(wildcard protos/baton/v1/*.proto)
# protoc looks for its plugins on the path. $(1): where to.
generate = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos \
	--python_out="$(1)" --grpc_python_out="$(1)" --mypy_out="$(1)" --mypy_grpc_out="$(1)" $(PROTOS)

.PHONY: help setup model run test check proto clean peers bench-engine bench-peers bench-isolation bench-handover

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name what; do \
		printf '%-20s %s\n' "make $$name" "$$what"; done

setup: $(STAMP) ## make the virtual environment .venv with pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	@python=; for candidate in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
		if $$candidate -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then \
		echo "Baton needs Python 3.11 or newer with its venv module; PYTHON=... names one" >&2; exit 1; fi; \
	$$python -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[local,dev]'
	@touch $@

model: $(STAMP) ## fetch and convert the sample model
	@$(BIN)/python scripts/fetch_model.py $(MODEL)

run: model ## start everything and stream the answer to a sample chat
	@$(BIN)/baton up --demo

test: model check ## run all checks and all tests
	$(BIN)/python -m pytest

check: $(STAMP) ## lint, format, types, import rules, protos, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint protos
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; $(call generate,$$fresh); \
	diff -r -x __init__.py -x __pycache__ "$$fresh/baton/v1" baton/v1 \
		|| { echo "baton/v1 is not what protos/ generates: run make proto" >&2; exit 1; }

proto: $(STAMP) ## generate baton/v1 from protos/
	$(call generate,.)

peers: $(STAMP) ## make the environments of the servers that Baton is compared with
	$(BIN)/python -m benchmarks.peers.environments

# A peer that cannot be installed or does not run is reported in the figures, so it does not stop them. BENCH=--quick is shorter.
bench-engine: model ## measure the engine alone against peers and the machine's limits
	-@$(BIN)/python -m benchmarks.peers.environments
	$(BIN)/python -m benchmarks.engine $(BENCH)

bench-peers: model ## measure the whole system against peers
	-@$(BIN)/python -m benchmarks.peers.environments
	$(BIN)/python -m benchmarks.whole_system $(BENCH)

bench-handover: model ## measure KV handovers over each transport beside a plain memory copy
	$(BIN)/python -m benchmarks.handover $(BENCH)

bench-isolation: model ## measure what one long prompt does to the chats beside it
	-@$(BIN)/python -m benchmarks.peers.environments vllm
	$(BIN)/python -m benchmarks.isolation $(BENCH)

clean: ## remove everything that was made here: environment, model, caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
