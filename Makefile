# `make` lists what there is. Every target sets up .venv by itself.

PYTHON_ENV := .venv/bin/python
PYTEST := $(PYTHON_ENV) -m pytest
# two test processes; a test file stays in one of them
PYTEST_TWICE := $(PYTEST) --numprocesses 2 --dist loadfile
.DEFAULT_GOAL := help
.PHONY: help install demo test test-cluster check clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## set up .venv with CacheSmith and what it needs
	@scripts/install.sh

demo: ## serve a small model on this machine and ask it about the sample documents
	@scripts/install.sh
	@$(PYTHON_ENV) -m deploy.demo

# One run a kind, so that engines and Ray clusters do not pile up. Tests with a Ray cluster, or with
# deadlines on Redis, have the machine to themselves. All run, even if one fails.
# pytest's status 5 says that there is no such test.
test: ## run all tests that need no GPU
	@scripts/install.sh --dev
	@scripts/redis_server.sh
	@failed=; \
	run() { \
		printf '\n== %s tests\n' "$$1"; kind=$$1; shift; "$$@"; status=$$?; \
		if [ $$status -ne 0 ] && [ $$status -ne 5 ]; then failed="$$failed $$kind"; fi; \
	}; \
	run unit $(PYTEST_TWICE) -m "not vllm and not ray and not redis and not gpu and not cluster"; \
	run redis $(PYTEST) -m "redis and not ray and not gpu and not cluster"; \
	run vllm $(PYTEST_TWICE) -m "vllm and not redis and not ray and not gpu and not cluster"; \
	run ray $(PYTEST) -m "ray and not gpu and not cluster"; \
	if [ -n "$$failed" ]; then printf '\nfailed:%s\n' "$$failed"; exit 1; fi; \
	printf '\nall tests passed\n'

test-cluster: ## as root: tests with several nodes, three test hosts under load and faults among them
	@scripts/install.sh --dev
	@scripts/testbed_programs.sh
	$(PYTEST) -m cluster -s

check: ## lint, formatting, types and the unit tests
	@scripts/install.sh --dev
	$(PYTHON_ENV) -m ruff check .
	$(PYTHON_ENV) -m ruff format --check .
	$(PYTHON_ENV) -m mypy planner kv_tier
	$(PYTEST_TWICE)

clean: ## remove caches and build outputs; .venv stays
	@rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
