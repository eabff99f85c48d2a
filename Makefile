# `make demo` and `make test` need Python 3.11 or newer, pip and make, and do the rest themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check chaos bench clean
.DEFAULT_GOAL := demo

# One stamp for the product and one for the tools around it, so that a demo need not wait for linters.
$(VENV)/.product: pyproject.toml constraints.txt hatch_build.py src/offbeat/runtime/collectives/one_sided/native.c src/offbeat/runtime/collectives/messages/channels.c $(wildcard src/offbeat/runtime/collectives/*.h) src/offbeat/runtime/backend/quick.c
	@echo "Setting up $(VENV) (torch is large: the first time takes a minute or two) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "offbeat needs Python 3.11 or newer; set PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[watch]"
	@touch $@

$(VENV)/.tools: $(VENV)/.product requirements-dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt
	@touch $@

demo: $(VENV)/.product ## A comparison in which two workers win, a slow worker that is blamed, a hang that is named (under 3 minutes)
	@bash examples/demo.sh $(BIN)/offbeat

test: $(VENV)/.tools ## Everything: format, lint, types, import contract, all tests
	@$(MAKE) --no-print-directory lint
	@$(BIN)/pytest -n 3 --dist worksteal -q

check: $(VENV)/.tools ## What to run before a commit: format, lint, types, import contract, fast tests
	@$(MAKE) --no-print-directory lint
	@$(BIN)/pytest -n 3 --dist worksteal -q -m "not slow"

chaos: $(VENV)/.tools ## Random kills and stops, snapshots, mutated messages, torch's own tests, and variants that `make test` leaves out (25 minutes)
	@$(BIN)/pytest -n 2 --dist worksteal -q --wide

.PHONY: lint
lint: $(VENV)/.tools
	@$(BIN)/ruff format --check --quiet src tests benchmarks docs examples
	@$(BIN)/ruff check --quiet src tests benchmarks docs examples
	@$(BIN)/pyright --pythonpath $(BIN)/python > $(VENV)/pyright.log || { cat $(VENV)/pyright.log; exit 1; }
	@$(BIN)/lint-imports > $(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }
	@echo "format, lint, types and import contract hold"

bench: $(VENV)/.tools ## Measure ourselves against our peers; writes benchmarks/results/*.json
	@for program in benchmarks/[a-z]*.py; do echo "== $$program"; $(BIN)/python $$program || exit 1; done

clean: ## Forget the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache runs
