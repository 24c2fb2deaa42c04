PYTHON ?= python3
BIN := .venv/bin
SHARED := -n 2 --dist loadfile --no-loadscope-reorder
RUNS := .venv/.runs
# The older of the two supported series of Dagster; its environment overlays .venv.
OLDER := 1.12
OF_DAGSTER := definitions specs components idle_runs executor sensors io_manager
# The oldest supported series of Spark; its environment overlays .venv, which has the newest by constraints.txt.
SERIES := 4.0
OF_SPARK := test_session test_frames test_init test_processes test_conformance core/test_as_of_join storage/test_store \
  storage/test_crash kafka/test_avro
STAMP := .venv/.installed
CLASSES := .venv/.classes.jsa
# uv installs in half a minute, pip in minutes; pip is used if uv is not available. Both install the locked versions.
INSTALL = $(BIN)/python -m uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e ".[$(EXTRAS)]" \
  || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"

.PHONY: install lock demo demo-all demo-kafka kafka test test-fast test-kafka test-older-dagster test-spark browser endurance ui lint docs bench bench-quick clean
.DELETE_ON_ERROR:

install: $(STAMP)

# The packages of demo and ui; tests and benchmarks need more.
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

# Locks the newest versions within the bounds of pyproject.toml, for each Python from 3.10 on.
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

# A class archive (CDS) of Spark, so that the JVM of a test starts faster; tests run without it too.
$(CLASSES): $(STAMP)
	@echo "Writing Spark's classes to $@: a minute, the first time"
	-@$(BIN)/python -m tests.class_archive $@

# The tests that need no JVM: half a minute.
test-fast: $(STAMP)
	$(BIN)/python -m pytest $(SHARED) -m fast

test-kafka: $(CLASSES)
	$(BIN)/python -m pytest $(SHARED) -m kafka

# Tests with and without a broker in one call, so that the two processes wait for each other only once.
test: $(CLASSES)
	$(BIN)/python -m pytest $(SHARED) -m "not endurance"

# By the real path of .venv: scripts contain it, and .venv may be a link that is removed later.
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

# With vt_dagster too, for the command that tests start.
.venv/.spark-$(SERIES): HOME_OF = $(realpath .venv)/spark-$(SERIES)
.venv/.spark-$(SERIES): $(STAMP)
	@$(PYTHON) -m venv --clear $(HOME_OF)
	@grep -v '^pyspark==' constraints.txt > $(HOME_OF)/constraints.txt
	@$(HOME_OF)/bin/python -m pip install --quiet --disable-pip-version-check -c $(HOME_OF)/constraints.txt \
	  "pyspark[connect]==$(SERIES).*"
	@$(HOME_OF)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$($(HOME_OF)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/locked.pth"
	@touch $@

test-spark: .venv/.spark-$(SERIES)
	PYTHONPATH=$(CURDIR) .venv/spark-$(SERIES)/bin/python -m pytest -p no:cacheprovider -m "not endurance" \
	  $(OF_SPARK:%=tests/%.py)

# Installs Chromium, if there is none, for the tests of Dagster's pages.
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

# Builds the site in build/docs; it can be opened as files, without a server or a network.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(STAMP)
	@rm -f build/docs/.whole
	PYTHONPATH=$(CURDIR) $(BIN)/python -m mkdocs build --strict --quiet
	@touch build/docs/.whole

# All rows of bench/README.md: two hours on two idle cores. The first command alone takes half an hour.
bench: $(STAMP)
	$(BIN)/python bench/run.py
	$(BIN)/python bench/run.py --executors --output bench/results-executors.json
	$(BIN)/python bench/run.py --processes 30 --output bench/results-processes.json
	$(BIN)/python bench/run.py --runs 1000 --output bench/results-runs.json
	$(BIN)/python bench/run.py --kafka --output bench/results-kafka.json

bench-quick: $(STAMP)
	$(BIN)/python bench/run.py --quick

clean:
	rm -rf .venv dist build .pytest_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
