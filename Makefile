# Every target installs what it needs into .venv. A fresh machine has Python (>= 3.10) and make.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Targets share .venv, logs and all cores: one at a time.
.NOTPARALLEL:

PYTHON ?= python3
PY := .venv/bin/python
# Installed: what the scripts need, and what the tests and checks need beside it.
INSTALLED := .venv/.installed
DEV_INSTALLED := .venv/.dev-installed
CORE_TESTS := $(addprefix tests/test_,$(addsuffix .py,model dataset parity optimizer scripts checkpoint))

##@ Start here
.PHONY: demo
demo: $(INSTALLED) ## What fits, is FSDP correct, what does it cost: all three on the smallest models (minutes on a CPU)
	@bash demo.sh

.PHONY: test
test: $(DEV_INSTALLED) ## The test suite
	$(PY) -m pytest -q -m "not long" -n 2 --dist loadfile

##@ Results
.PHONY: figures
figures: $(INSTALLED) ## Rewrite README's tables, and the figures, from the logs in logs/published/
	@for study in logs/published/*/scaling; do \
	  [ ! -d "$$study" ] || $(PY) plots.py --logs "$$study" \
	    --output-dir "plots/published/$$(basename "$$(dirname "$$study")")"; \
	done
	$(PY) figures.py

.PHONY: parity
parity: $(INSTALLED) ## FSDP against no FSDP on the CPU, in every way of running it (minutes; goes on where it stopped)
	$(PY) benchmarks/parity_series.py

.PHONY: bench-gpu
bench-gpu: $(INSTALLED) ## Speed of train.py on the GPU at hand, beside what its matmuls sustain (goes on where it stopped)
	$(PY) benchmarks/bench_gpu.py

.PHONY: bench-links
bench-links: $(INSTALLED) ## What the link between two GPUs costs: collectives and steps (goes on where it stopped)
	$(PY) benchmarks/bench_links.py

.PHONY: what-fits
what-fits: $(INSTALLED) ## What loads and what trains on the GPU at hand, and on more of them, simulated (goes on where it stopped)
	$(PY) benchmarks/what_fits.py

##@ Development
.PHONY: test-long
test-long: $(DEV_INSTALLED) ## The tests that take minutes each
	$(PY) -m pytest -v -m long

.PHONY: test-oldest
test-oldest: ## The core tests under the oldest torch that is supported (an environment of its own)
	$(PYTHON) -m venv .venv-oldest
	@sed 's/^torch==.*/torch==2.10.*/' requirements.txt > .venv-oldest/requirements.txt
	@sed 's/^-r .*/-r requirements.txt/' requirements-dev.txt > .venv-oldest/requirements-dev.txt
	.venv-oldest/bin/python -m pip install -q --disable-pip-version-check -r .venv-oldest/requirements-dev.txt
	.venv-oldest/bin/python -m pytest -q -m "not long" $(CORE_TESTS)

.PHONY: slurm-fixture
slurm-fixture: ## Install the Slurm that tests/test_slurm.py starts (root, apt)
	@tests/slurm/install.sh

.PHONY: lint
lint: $(DEV_INSTALLED) ## Lint, format and types: ruff and pyright
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

.PHONY: format
format: $(DEV_INSTALLED) ## Format the code and mend what ruff can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

.PHONY: bench-data
bench-data: $(INSTALLED) ## Tokens per second of the data pipeline, and the time to its first batch
	$(PY) benchmarks/bench_data.py

##@ Housekeeping
.PHONY: env
env: $(INSTALLED) ## Make .venv and install the pinned requirements

# Inside the container: its own torch, and the packages that it lacks. Its pip is told (by
# PIP_CONSTRAINT) to keep the versions of the image; ours stand beside them in the environment.
.PHONY: env-container
env-container: ## Make .venv-container on top of the torch of a container (run it inside)
	$(PYTHON) -m venv --system-site-packages .venv-container
	@grep -v '^torch==' requirements.txt > .venv-container/requirements.txt
	PIP_CONSTRAINT= .venv-container/bin/python -m pip install -q --disable-pip-version-check \
	  -r .venv-container/requirements.txt
	@.venv-container/bin/python -c 'import torch; print("torch", torch.__version__, torch.__file__)'

.PHONY: clean
clean: ## Remove .venv, caches, and what make demo wrote
	rm -rf .venv .venv-oldest .venv-container .pytest_cache .ruff_cache .hypothesis logs/demo/*.out plots/demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# An environment whose pip does not start (a machine without python3-venv leaves one) is made anew.
$(INSTALLED): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "make: $(PYTHON) is too old or missing: Python >= 3.10 is needed (make PYTHON=...)" >&2; exit 2; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv || \
	  { echo "make: no environment could be made (Debian, Ubuntu: apt install python3-venv)" >&2; exit 2; }
	@echo "Installing requirements.txt into .venv"
	@$(PY) -m pip install -q --disable-pip-version-check -r requirements.txt
	@touch $@

$(DEV_INSTALLED): requirements-dev.txt $(INSTALLED)
	@echo "Installing requirements-dev.txt into .venv"
	@$(PY) -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	@touch $@
