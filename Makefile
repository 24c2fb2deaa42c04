PYTHON ?= python3
BIN := .venv/bin
SHARED := -n 2 --dist loadfile --no-loadscope-reorder
RUNS := .venv/.runs
# The older of the two series of Dagster that are supported, in an environment over the other one.
OLDER := 1.12
OF_DAGSTER := definitions specs components nothing_new executor sensors io_manager
STAMP := .venv/.installed
CLASSES := .venv/.classes.jsa
# uv takes half a minute where pip takes minutes; pip where uv cannot be had. Both take the locked versions.
INSTALL = $(BIN)/python -m uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e ".[$(EXTRAS)]" \
  || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"

.PHONY: install lock demo demo-all demo-kafka kafka test test-fast test-kafka test-older-dagster browser endurance ui lint docs bench bench-quick clean
.DELETE_ON_ERROR:

install: $(STAMP)

# What demo and ui need; tests and benchmarks need more.
$(RUNS): EXTRAS := kafka,demo,ui,explore
$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Expected Python 3.10 or newer, got: $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=/path/to/python3.12 $(or $(MAKECMDGOALS),install)"; exit 1; }
	@echo "Installing vt_dagster into .venv: a minute, the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.9,<1" || true
	@$(INSTALL)
	@touch $@

$(STAMP): EXTRAS := dev
$(STAMP): $(RUNS)
	@echo "Installing what tests and benchmarks need into .venv"
	@$(INSTALL)
	@touch $@

# The versions that are installed: the newest that the bounds allow, for each Python from 3.10 on.
lock: $(RUNS)
	$(BIN)/python -m uv pip compile pyproject.toml --quiet --universal --python-version 3.10 --all-extras --upgrade \
	  --no-annotate --custom-compile-command "make lock" --output-file constraints.txt

demo: $(RUNS)
	$(BIN)/vt-dagster demo

demo-all: $(RUNS)
	$(BIN)/vt-dagster demo --all

demo-kafka: $(RUNS)
	$(BIN)/vt-dagster demo --kafka

kafka: $(RUNS)
	$(BIN)/python -m vt_dagster.testing_kafka data/kafka

# The classes of Spark, as every JVM of a test would load them from its jars; tests run without them too.
$(CLASSES): $(STAMP)
	@echo "Writing Spark's classes to $@: a minute, the first time"
	-@$(BIN)/python -m tests.class_archive $@

# What needs no JVM: an answer in a minute.
test-fast: $(STAMP)
	$(BIN)/python -m pytest $(SHARED) -m fast

test-kafka: $(CLASSES)
	$(BIN)/python -m pytest $(SHARED) -m kafka

# With a broker and without at once: two processes wait for each other once, not twice.
test: $(CLASSES)
	$(BIN)/python -m pytest $(SHARED) -m "not endurance"

# By its real path: scripts begin with it, and .venv may be a link that goes.
.venv/.dagster-$(OLDER): HOME_OF = $(realpath .venv)
.venv/.dagster-$(OLDER): $(STAMP)
	@$(PYTHON) -m venv --clear $(HOME_OF)/older
	@$(HOME_OF)/older/bin/python -m pip install --quiet --disable-pip-version-check "dagster==$(OLDER).*"
	@$(HOME_OF)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$(.venv/older/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/newer.pth"
	@touch $@

test-older-dagster: .venv/.dagster-$(OLDER)
	PYTHONPATH=$(CURDIR) .venv/older/bin/python -m pytest -p no:cacheprovider -m "not kafka and not slow and not endurance" \
	  -W "ignore::DeprecationWarning" $(OF_DAGSTER:%=tests/test_%.py)

# Chromium, where there is none, for the tests that look at Dagster's pages.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    chromium fonts-dejavu-core; } || { \
	  echo "Expected Chromium on PATH, found none, and it could not be installed: install it yourself."; exit 1; }

endurance: $(STAMP)
	$(BIN)/python -m pytest -m endurance

ui: export DAGSTER_HOME := $(abspath data/dagster_home)
ui: $(RUNS)
	@mkdir -p "$$DAGSTER_HOME" && cp assets/dagster.yaml "$$DAGSTER_HOME"
	@if ! $(BIN)/vt-dagster spark status >/dev/null; then \
	  $(BIN)/vt-dagster spark start && trap '$(BIN)/vt-dagster spark stop' EXIT INT TERM; fi; \
	  VT_DAGSTER_SPARK=server $(BIN)/dg dev -w workspace.yaml

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# The site, in build/docs; opens without a network and without a server.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(STAMP)
	PYTHONPATH=$(CURDIR) $(BIN)/python -m mkdocs build --strict --quiet

bench: $(STAMP)
	$(BIN)/python bench/run.py

bench-quick: $(STAMP)
	$(BIN)/python bench/run.py --quick

clean:
	rm -rf .venv dist build .pytest_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
