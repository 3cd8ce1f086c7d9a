# `make` lists what there is. Every target sets up .venv by itself.

PYTHON_ENV := .venv/bin/python
# test processes at a time; a test file stays in one of them
TEST_JOBS := 2
PYTEST := $(PYTHON_ENV) -m pytest --numprocesses $(TEST_JOBS) --dist loadfile
.DEFAULT_GOAL := help
.PHONY: help install demo test test-cluster check clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## set up .venv with CacheSmith and what it needs
	@scripts/install.sh

demo: ## serve a small model on this machine and ask it about the sample documents
	@scripts/install.sh
	@$(PYTHON_ENV) -m deploy.demo

# One run a kind, so that engines and Ray clusters do not pile up. All run, even if one fails.
# pytest's status 5 says that there is no such test.
test: ## run all tests that need no GPU
	@scripts/install.sh --dev
	@scripts/redis_server.sh
	@failed=; \
	for kind in \
		"unit:not vllm and not ray and not redis and not gpu and not cluster" \
		"redis:redis and not vllm and not ray and not gpu and not cluster" \
		"vllm:vllm and not ray and not gpu and not cluster" \
		"ray:ray and not gpu and not cluster"; \
	do \
		printf '\n== %s tests\n' "$${kind%%:*}"; \
		$(PYTEST) -m "$${kind#*:}"; status=$$?; \
		if [ $$status -ne 0 ] && [ $$status -ne 5 ]; then failed="$$failed $${kind%%:*}"; fi; \
	done; \
	if [ -n "$$failed" ]; then printf '\nfailed:%s\n' "$$failed"; exit 1; fi; \
	printf '\nall tests passed\n'

test-cluster: ## as root: tests with several nodes, three test hosts under load and faults among them
	@scripts/install.sh --dev
	@scripts/testbed_programs.sh
	$(PYTHON_ENV) -m pytest -m cluster -s

check: ## lint, formatting, types and the unit tests
	@scripts/install.sh --dev
	$(PYTHON_ENV) -m ruff check .
	$(PYTHON_ENV) -m ruff format --check .
	$(PYTHON_ENV) -m mypy planner kv_tier
	$(PYTEST)

clean: ## remove caches and build outputs; .venv stays
	@rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
