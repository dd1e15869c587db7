# Each environment is made once and again when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
EXTRA ?= test
BIN = $(VENV)/bin
# Bytecode is kept where the environment asks Python to write none, too: without it each process
# compiles JAX's modules anew, for two seconds.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.cache/bytecode

.PHONY: demo demo-compression demo-recommender gallery test test-product outside nightly properties faults soak scale lint bench bench-check compiled pods compilers tables outputs docs docs-serve release clean

demo: $(VENV)/.demo
	$(BIN)/python -m examples.demo

demo-compression: $(VENV)/.demo
	$(BIN)/python -m examples.compression

demo-recommender: $(VENV)/.demo
	$(BIN)/python -m examples.recommender

gallery: $(VENV)/.bench
	$(BIN)/python -m examples.gallery

# First what stands on the programs as XLA optimizes them, then the rest, which is compiled quickly;
# these programs are kept in .cache for the next run. As many workers as cores and memory allow:
# tests/machine.py. Where TESTS has nothing of one kind, pytest ends with 5. EXTRA=pytest installs
# less, for tests that need no other libraries.
PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal --durations 25 $(OPTIONS)

test: TESTS ?= --ignore tests/product
test: $(VENV)/.$(EXTRA)
	$(PYTEST) -m optimized $(TESTS) || [ $$? -eq 5 -a "$(origin TESTS)" != file ]
	$(PYTEST) --quick-compiler $(TESTS) || [ $$? -eq 5 -a "$(origin TESTS)" != file ]

# Whole programs: of the documentation, examples, benchmarks, pictures, the wheel, processes, faults.
test-product: $(VENV)/.test
	$(MAKE) test TESTS=tests/product

# Programs of others that take an optimizer of optax: all that tests/clients.py lists.
outside:
	OPTFN_OUTSIDE=1 $(MAKE) test VENV=$(VENV)-outside EXTRA=outside TESTS=tests/outside

# All values of the grids of which `make test` runs a part, 5,400 properties, all faults, a soak, steps
# compiled for 512 devices, and programs of others.
nightly:
	$(MAKE) test test-product OPTIONS=--nightly
	$(MAKE) properties faults soak scale outside

# 68 times as many cases as in the suite, other ones each time.
properties: $(VENV)/.test
	OPTFN_PROPERTIES=nightly $(BIN)/python -m pytest -n auto \
	  --quick-compiler tests/contract/test_properties.py

# ONLY="sigterm_one disk_full" tries these; links and disks need root, and ip, tc, unshare and mount.
faults: $(VENV)/.test
	$(BIN)/python tests/faults.py $(if $(ONLY),--only $(ONLY))

soak: $(VENV)/.demo
	$(BIN)/python -m benchmarks.studies.soak

# Steps are compiled for 512 devices, and nothing runs: fails where a cost grows with the devices.
scale: $(VENV)/.demo
	$(BIN)/python -m benchmarks.scale

tables: $(VENV)/.demo
	$(BIN)/python -m docs.tables
	$(BIN)/python -m benchmarks.pages

# What the programs of the documentation print, below each of them. PAGES="tour.md" runs these pages.
outputs: $(VENV)/.test
	$(BIN)/python -m docs.programs $(PAGES)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/yamllint --strict -d '{extends: default, rules: {line-length: {max: 100}}}' examples/elastic
	$(BIN)/shellcheck examples/elastic/*.sh .ci/release

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# Updates as the compilers of TPUs and of a GPU make them, which need Python 3.12 and no device.
# OPTIONS="--only adam,lamb --target v5e --tree matrix" compiles these.
compiled: compilers
	$(VENV)-compiled/bin/python -m benchmarks.compiled $(OPTIONS)

# Steps on many chips, likewise. OPTIONS="--model small --topology 'v5e:*' --only 'FSDP;ZeRO'"
pods: compilers
	$(VENV)-compiled/bin/python -m benchmarks.pods $(OPTIONS)

compilers: NEWER = $(if $(filter file,$(origin PYTHON)),$(shell .ci/newer),$(PYTHON))
compilers:
	$(MAKE) $(VENV)-compiled/.compile VENV=$(VENV)-compiled PYTHON=$(NEWER)

# Strict: a warning, a link to nowhere or a page outside the navigation ends it.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

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

# dist/ is for PyPI; dist-about/ has the list of parts (SBOM) and the site of this version.
release: $(VENV)/.release
	VENV=$(VENV) .ci/release

clean:
	rm -rf $(VENV) $(VENV)-outside $(VENV)-compiled .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis demo-out bench-out dist dist-about site
