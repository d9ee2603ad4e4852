# Commands for users and developers, starting from a fresh clone. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_BENCH := $(VENV)/.installed-bench
INSTALLED_DOCS := $(VENV)/.installed-docs

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo figures test test-all lint bench docs clean

help: ## List these targets.
	@echo "Equilibria. The first command creates $(VENV) and installs into it."
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target about; \
		do printf '%-16s %s\n' "$$target" "$$about"; done
	@echo
	@echo "Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  JOBS=$(JOBS) (test processes)  ARGS= (passed to the program, e.g. make test ARGS='-k relu')"

demo: $(INSTALLED) ## Run the demonstration, which trains a small model and writes a report.
	$(BIN)/equilibria demo --overwrite $(ARGS)

# The demonstration draws the first figure of the gallery. Pictures of tables are drawn from their records.
figures: demo ## Redraw the figures of docs/gallery.md and docs/results.
	cp equilibria-demo/convergence-*.svg docs/images/
	$(BIN)/equilibria reproduce --redraw docs/results

# One thread per process: processes that use every core slow each other down.
test: $(INSTALLED) ## Run all tests except the slow ones.
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

test-all: $(INSTALLED) ## Run all tests.
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(INSTALLED) ## Check style, types, prose, and the import rule between rooms.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.prose

bench: $(INSTALLED_BENCH) ## Compare with TorchDEQ and print a table of ratios.
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(INSTALLED_DOCS) ## Build the documentation into site/, readable offline; ARGS=serve serves it.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build --strict --quiet)

clean: ## Remove the environment, caches and build products.
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
	find src tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || \
		{ echo "Cannot find '$(PYTHON)'. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Equilibria needs Python 3.10 or newer, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name a newer one: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "'$(PYTHON)' has no venv module. Install it (Debian and Ubuntu: apt-get install python3-venv), or name another Python: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Installing Equilibria into $(VENV). The first time takes a few minutes, mostly for PyTorch."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

$(INSTALLED_BENCH): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,bench]'
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,docs]'
	@touch $@
