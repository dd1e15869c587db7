# Each environment is made once and again when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
EXTRA ?= test
BIN = $(VENV)/bin

.PHONY: demo demo-compression demo-recommender gallery test nightly properties faults soak lint bench bench-check tables docs docs-serve clean

demo: $(VENV)/.demo
	$(BIN)/python -m examples.demo

demo-compression: $(VENV)/.demo
	$(BIN)/python -m examples.compression

demo-recommender: $(VENV)/.demo
	$(BIN)/python -m examples.recommender

gallery: $(VENV)/.bench
	$(BIN)/python -m examples.gallery

# First what stands on the programs as XLA optimizes them, then the rest, which is compiled quickly.
# As many workers as cores and memory allow: tests/conftest.py. Where TESTS has nothing of one kind,
# pytest ends with 5. EXTRA=pytest installs less, for tests that need no other libraries.
test: $(VENV)/.$(EXTRA)
	$(BIN)/python -m pytest -n auto --dist worksteal -m optimized $(OPTIONS) $(TESTS) || [ -n "$(TESTS)" -a $$? -eq 5 ]
	$(BIN)/python -m pytest -n auto --dist worksteal --quick-compiler $(OPTIONS) $(TESTS) || [ -n "$(TESTS)" -a $$? -eq 5 ]

# All values of the grids of which `make test` runs a part, 5,400 properties, all faults, and a soak.
nightly:
	$(MAKE) test OPTIONS=--nightly
	$(MAKE) properties faults soak

# Eighteen times as many cases as in the suite, other ones each time.
properties: $(VENV)/.test
	OPTFN_PROPERTIES=nightly $(BIN)/python -m pytest -n auto --quick-compiler tests/test_properties.py

# ONLY="sigterm_one disk_full" tries these; links and disks need root, and ip, tc, unshare and mount.
faults: $(VENV)/.test
	$(BIN)/python tests/faults.py $(if $(ONLY),--only $(ONLY))

soak: $(VENV)/.demo
	$(BIN)/python -m benchmarks.soak

# The rows of README.md and docs/catalogue.md that docstrings have.
tables: $(VENV)/.demo
	$(BIN)/python -m docs.tables

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# Strict: a warning, a link to nowhere or a page outside the navigation ends it.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "optfn needs Python 3.11 or newer; PYTHON=$(PYTHON) is $$($(PYTHON) --version)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable ".[$*]"
	@touch $@

# The ratios of a new run against the published ones, in benchmarks/results.json.
bench-check: $(VENV)/.bench
	$(BIN)/python -m benchmarks.check

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis demo-out bench-out dist site
