# The one entry to the project. `make` alone lists what it can do.

PYTHON ?= python3
WORKERS ?= 3
BENCH ?=
PLANTED ?=
DEMO ?=
SPARK ?=
SEEDS ?= 0-9
HOURS ?= 1

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Bytecode is kept, whatever the shell says: the tests start thousands of processes, and each would compile every module.
export PYTHONDONTWRITEBYTECODE :=

# Tests sync hundreds of thousands of times; what a sync is worth they show on simulated disks. So their files lie in
# memory where there is plenty of it. The campaigns, which kill what really writes, keep theirs on the disk.
MEMORY = $(shell sh tests/memory.sh)

# Each Spark of a test lives for seconds. Java's second compiler makes code for hours, which takes half of their processor.
SPARK_SUBMIT_OPTS ?= -XX:TieredStopAtLevel=1

PYTEST = BSFG_SOAK=short SPARK_SUBMIT_OPTS='$(SPARK_SUBMIT_OPTS)' $(BIN)/pytest -n $(WORKERS) --dist loadgroup --durations 40 --durations-min 8

.DEFAULT_GOAL := help
.PHONY: archive bundle docs help venv lint format programs test tests campaigns planted simulate trace soak house demo bench proto reference clean

help: ## Show this help
	@echo "BSFG: a bidirectional store-and-forward gateway."
	@echo
	@echo "New here? Run 'make demo' to watch it survive a cut network and a kill, then 'make test' to check everything."
	@echo "Each target creates its own environment in $(VENV); only Python 3.11+ (with venv) and make are needed."
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Variables: PYTHON=$(PYTHON) (the interpreter), WORKERS=$(WORKERS) (parallel test processes),"
	@echo "           BENCH (options of the benchmark, such as BENCH='--facts 10000000 --json'),"
	@echo "           DEMO (options of the demo, such as DEMO='--three-zones --keep'),"
	@echo "           PLANTED (options of the planted bugs, such as PLANTED='--only links_always_open'),"
	@echo "           SEEDS and HOURS (campaigns of make simulate, such as SEEDS=0-99 HOURS=4; one seed repeats a run)."

venv: $(STAMP) ## Create the environment and install the package for development

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "BSFG needs Python 3.11 or newer; choose one with: make venv PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[node,spark,dev]'
	@$(BIN)/python -m compileall -q src
	@touch $@

lint: venv ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## Rewrite the source in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

programs: ## Install Chromium, curl and Node.js for the tests, if they are not here (Debian, as root)
	@sh tests/programs.sh

test: venv programs ## Run lint and every test but the campaigns (ten to twenty-five minutes on two cores)
	@$(MAKE) --no-print-directory -j 2 lint tests

# What later starts of Spark map instead of reading it; made once for a Java and a Spark, in the user's cache.
archive: venv
	@$(BIN)/python -c 'from bsfg.spark.archive import main; main()' || echo "Spark starts without an archive of its classes."

tests: venv programs archive
	$(if $(MEMORY),TMPDIR=$(MEMORY)) $(PYTEST) -m 'not campaign and not long' tests

campaigns: venv programs archive ## Run what takes minutes each, in its short form: kills, attacks, clusters, pasted pages
	$(PYTEST) -m 'campaign and not long' tests

planted: venv ## Plant small bugs in a copy, one by one, and demand that a test catches each
	@$(BIN)/python -m tests.planted.run $(PLANTED)

simulate: venv ## Run two nodes on simulated machines in virtual time, one campaign per seed
	@$(BIN)/python -m tests.simulated.run $(SEEDS) --hours $(HOURS)

soak: venv ## Run everything with a long form in it (hours, other seeds each time)
	BSFG_SOAK=long $(BIN)/pytest --timeout 0 -m 'soak or long' tests

house: venv ## Print the figures of the code base beside their bounds
	@$(BIN)/python -m tools.house -v

trace: venv ## Record which files and functions of the product one fact passes, leg by leg (about a minute)
	@$(BIN)/python -m tools.trace -v

demo: venv ## Cut two zones apart, kill a node, heal it all, and prove that nothing is lost or doubled
	@$(BIN)/bsfg demo $(DEMO)

bench: venv ## Measure the embedded log against this machine's SHA-256
	@$(BIN)/bsfg bench store $(BENCH)

reference: venv ## Write docs/reference from the code itself
	@$(BIN)/python -m tools.pages

docs: venv ## Build the documentation as a web site, into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site
	@echo "Wrote build/site/index.html"

bundle: venv ## Write an archive into dist that installs BSFG without a network (SPARK=no: a smaller one)
	@$(BIN)/python -m tools.bundle $(if $(filter no,$(SPARK)),--without-spark)

proto: venv ## Renew the messages that are generated from the protocol files
	$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src \
	  src/bsfg/wire/boundary.proto src/bsfg/wire/admin.proto

clean: ## Remove the environment, caches and build products
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
