# Each environment is made once and again when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
EXTRA ?= test
BIN = $(VENV)/bin
# Bytecode is kept where the environment asks Python to write none, too: without it each process
# compiles JAX's modules anew, for two seconds.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.cache/bytecode

.PHONY: help demo demo-compression demo-recommender gallery test test-product outside nightly properties draws power faults soak scale lint bench bench-check chip compiled pods host compilers zoo tables outputs docs docs-serve release clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo ## train a small transformer with three optimizers, in two minutes
	$(BIN)/python -m examples.demo

demo-compression: $(VENV)/.demo ## train on four workers with Deep Gradient Compression
	$(BIN)/python -m examples.compression

demo-recommender: $(VENV)/.demo ## train a recommender on a large embedding table
	$(BIN)/python -m examples.recommender

gallery: $(VENV)/.bench ## draw the pictures of docs/pictures, in a few minutes
	$(BIN)/python -m examples.gallery

# EXTRA=pytest installs less, for tests that need no other libraries.
test: TESTS ?= --ignore tests/product --ignore tests/outside
test: $(VENV)/.$(EXTRA) ## test the library; TESTS="tests/rules -k lamb" chooses tests
	VENV=$(VENV) .ci/test $(OPTIONS) $(TESTS)

# Whole programs: drawn ones, those of the documentation, examples, benchmarks, pictures, the wheel,
# processes, faults; models and programs of other libraries.
test-product: $(VENV)/.test ## test drawn programs, docs, examples, other libraries, the wheel, processes
	$(MAKE) test TESTS="tests/product tests/outside"

# Programs of others that take an optimizer of optax: all that tests/clients.py lists.
outside: ## test programs that take an optimizer of optax; 9 GB of packages
	OPTFN_OUTSIDE=1 $(MAKE) test VENV=$(VENV)-outside EXTRA=outside TESTS=tests/outside

# All values of the grids of which `make test` runs a part, each test on the newest JAX of which CI runs
# a third, 1,632 properties, all faults, a soak, steps compiled for 512 devices, and programs of others.
nightly: ## test whole grids, properties, faults, soak, scale, outside; over an hour
	$(MAKE) test test-product OPTIONS=--nightly
	.ci/test-newer --cases 1
	$(MAKE) properties faults soak scale outside
	$(MAKE) draws N=500 SEED=$$(date +%s) PROCESSES=2
	$(MAKE) draws N=1000000 SEED=$$(date +%s) OPTIONS="--avoid --seconds 3600"

# 136 times as many cases as in the suite, other ones each time.
properties: $(VENV)/.test ## test 1,632 drawn cases
	OPTFN_PROPERTIES=nightly $(BIN)/python -m pytest -n auto \
	  --quick-compiler tests/contract/test_properties.py

# OPTIONS="--avoid" leaves out programs that meet a known fault, and OPTIONS="--keep" keeps what fails.
draws: N ?= 500
draws: SEED ?= 1
draws: $(VENV)/.test ## compare N=500 drawn programs of SEED=1 with a reference run; TREE=another checkout, PROCESSES=2
	PYTHONPATH=tests $(BIN)/python -m reference_run$(if $(PROCESSES),.processes) --programs $(N) --seed $(SEED) \
	  $(if $(TREE),--tree $(TREE)) $(OPTIONS)

power: $(VENV)/.test ## which faults, put into optfn, drawn programs find; in an hour
	PYTHONPATH=tests $(BIN)/python -m reference_run.power --avoid $(OPTIONS)

# ONLY="sigterm_one disk_full" tries these; links and disks need root, and ip, tc, unshare and mount.
faults: $(VENV)/.test ## try kills, links, disks and files, in 20 minutes; ONLY="disk_full" chooses
	PYTHONPATH=tests $(BIN)/python -m faults $(if $(ONLY),--only $(ONLY))

soak: $(VENV)/.demo ## train 10,000 steps: memory and objects stay as they are
	$(BIN)/python -m benchmarks.studies.soak

# Steps are compiled for 512 devices, and nothing runs: fails where a cost grows with the devices.
scale: $(VENV)/.demo ## compile steps for 512 devices: no cost grows with them
	$(BIN)/python -m benchmarks.scale

tables: $(VENV)/.demo ## write the rows and pages that follow from code and JSON files
	$(BIN)/python -m docs.tables
	$(BIN)/python -m benchmarks.pages

# A library that is not installed, as keras here, keeps its outcomes.
zoo: $(VENV)/.test ## train each small model with each ability, and keep what works; then make tables
	PYTHONPATH=.:tests $(BIN)/python -m zoo.matrix

# What the programs of the documentation print, below each of them. PAGES="tour.md" runs these pages.
outputs: $(VENV)/.test ## write what the programs of the docs print; PAGES="tour.md" chooses
	$(BIN)/python -m docs.programs $(PAGES)

lint: $(VENV)/.dev ## run ruff, mypy, yamllint and shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/yamllint --strict -d '{extends: default, rules: {line-length: {max: 100}}}' examples/elastic
	$(BIN)/shellcheck examples/elastic/*.sh .ci/release .ci/run .ci/test .ci/test-newer

bench: $(VENV)/.bench ## run all benchmarks, in twenty minutes
	$(BIN)/python -m benchmarks

# The ratios of a new run against the published ones, in benchmarks/results.json.
bench-check: $(VENV)/.bench ## run all benchmarks, and compare the ratios with the published ones
	$(BIN)/python -m benchmarks.check

# VENV names an environment whose JAX has the plugin of the chip; OPTIONS="--toy" tries it on a CPU.
chip: $(VENV)/.bench ## measure steps and updates on a GPU or TPU, in nine minutes
	$(BIN)/python -m benchmarks.chip $(OPTIONS)

# Updates as the compilers of TPUs and of a GPU make them, which need Python 3.12 and no device.
# OPTIONS="--only adam,lamb --target v5e --tree matrix" compiles these.
compiled: compilers ## compile updates for TPUs and a GPU, without a device
	$(VENV)-compiled/bin/python -m benchmarks.compiled $(OPTIONS)

# Steps on many chips, likewise. OPTIONS="--model small --topology 'v5e:*' --only 'FSDP;ZeRO'"
pods: compilers ## compile steps for 16 to 512 chips, without a device
	$(VENV)-compiled/bin/python -m benchmarks.pods $(OPTIONS)

# The state of the optimizer on the host. OPTIONS="--model 7B --topology 1x1x1 --only streamed"
host: compilers ## compile steps whose optimizer state lies on the host, without a device
	$(VENV)-compiled/bin/python -m benchmarks.host $(OPTIONS)

compilers: NEWER = $(if $(filter file,$(origin PYTHON)),$(shell .ci/newer),$(PYTHON))
compilers:
	$(MAKE) $(VENV)-compiled/.compile VENV=$(VENV)-compiled PYTHON=$(NEWER)

# Strict: a warning, a link to nowhere or a page outside the navigation ends it.
docs: $(VENV)/.docs ## build the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

docs-serve: $(VENV)/.docs ## build the site, and show it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "optfn needs Python 3.11 or newer; PYTHON=$(PYTHON) is $$($(PYTHON) --version)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The extras that another one has: pip takes six seconds to see that nothing is missing.
$(VENV)/.dev: HAS = test docs bench demo
$(VENV)/.test: HAS = docs bench demo

$(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable ".[$*]"
	@touch $@ $(HAS:%=$(VENV)/.%)

# dist/ is for PyPI; dist-about/ has the list of parts (SBOM) and the site of this version.
release: $(VENV)/.release ## build, install and try dist/
	VENV=$(VENV) .ci/release

clean: ## remove environments, caches and outputs
	rm -rf $(VENV) $(VENV)-outside $(VENV)-compiled .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis demo-out bench-out dist dist-about site
