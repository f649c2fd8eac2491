# make demo | setup | test | test-all | test-servers | test-matrix | test-pythons | mutants | lint | docs | bench | chaos |
# soak | model | clean. Each but model sets up .venv first, once, and again only when pyproject.toml changed. `make demo`
# installs what the demo needs, and the others add the rest. If uv is on the PATH, it installs the packages, in less time than pip.
# Needs Python >= 3.10 and Java >= 17, nothing else. PYTHON=… and JAVA_HOME=… choose which.
PYTHON ?= python3
JAVA := $(if $(JAVA_HOME),$(JAVA_HOME)/bin/java,java)
BENCH ?= postgres kafka mysql
# Test processes at once; some have the processors while the others wait for their servers.
PROCESSES ?= 4
PYTEST := -m pytest -n $(PROCESSES) --dist loadscope --no-loadscope-reorder
BIN := .venv/bin
DEMO := .venv/.demo
READY := .venv/.ready
UV := $(shell command -v uv)
CLASSES := .cache/spark-classes.jsa
# What Spark's Python workers import: each start of a job would compile it again.
COMPILE := $(BIN)/python -c 'from tests.jvm import compile_modules; compile_modules()'

export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
export PYSPARK_DRIVER_PYTHON := $(PYSPARK_PYTHON)
# Tests start hundreds of interpreters; each would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE
# What leads whoever works here to another Spark, PostgreSQL or proxy must not lead these commands there.
unexport $(filter-out SPARK_LOCAL_IP,$(filter PG% SPARK_% PYSPARK_SUBMIT_ARGS HADOOP_% PYTHONPATH PYTHONHOME,$(.VARIABLES)))
export no_proxy := 127.0.0.1,127.0.0.2,localhost,$(or $(no_proxy),$(NO_PROXY))
export NO_PROXY := $(no_proxy)

.PHONY: demo setup test test-all test-servers test-matrix test-pythons mutants lint docs bench chaos soak model clean java
.DEFAULT_GOAL := test

demo: java $(DEMO)
	@$(BIN)/python -m examples.flights_demo

# For the other examples.
setup: java $(READY)

# The short loop, or, where ARGS names tests, all of those that are not further cases. .ci/run gives its own TESTS; one in
# the environment does not count.
TESTS := $(if $(filter tests%,$(ARGS)),not large,short)

test: java $(READY) $(CLASSES)
	@$(BIN)/python $(PYTEST) -m "$(TESTS)" $(ARGS)

test-all: java $(READY) $(CLASSES)
	@$(BIN)/python $(PYTEST) $(ARGS)
	@$(if $(filter tests%,$(ARGS)),,$(MAKE) --no-print-directory test-servers)

# The suites of a sink over each of these versions of its server. ARGS may name tests.
POSTGRES ?= 13 14 15 16 17 18
MARIADB ?= 10.11 11.4

test-servers: $(addprefix postgres-,$(POSTGRES)) $(addprefix mariadb-,$(MARIADB))

postgres-%: $(READY) $(CLASSES) | java
	@echo "on PostgreSQL $*"
	@TEST_POSTGRES_VERSION=$* $(BIN)/python $(PYTEST) $(if $(filter tests%,$(ARGS)),,tests/postgres) $(ARGS)

mariadb-%: $(READY) $(CLASSES) | java
	@echo "on MariaDB $*"
	@TEST_MARIADB_VERSION=$* $(BIN)/python $(PYTEST) -k MariaDB $(if $(filter tests%,$(ARGS)),,tests/mysql) $(ARGS)

mutants: java $(READY) $(CLASSES)
	@$(BIN)/python -u -m tests.mutants $(ARGS)

# On the newest release of each of these Sparks, under .cache/pyspark (make clean, or delete them there, for newer ones).
SPARKS ?= 3.5 4.0 4.1 4.2 4.3

test-matrix: $(addprefix spark-,$(SPARKS))

spark-%: .cache/pyspark/% $(READY) | java
	@echo "on Spark $*: $$(ls $< | sed -n 's/^pyspark-\(.*\)\.dist-info$$/\1/p')"
	@PYTHONPATH=$(CURDIR)/$< $(BIN)/python -m pytest tests/matrix/suite.py tests/spark/test_internals.py tests/spark/test_arrow.py \
		tests/spark/test_newer_spark.py $(ARGS)

.PRECIOUS: .cache/pyspark/%
.cache/pyspark/%: | $(READY)
	@rm -rf $@.part
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --timeout 20 --retries 2 \
		--target $@.part 'pyspark==$*.*' || \
		{ echo "Spark $* was not tested: it could not be installed, see above. Does the package index answer?" >&2; exit 1; }
	@PYTHONPATH=$@.part $(COMPILE)
	@mv $@.part $@

# On each of these Pythons that is on the PATH: what needs no Spark, and one job of Spark that is killed.
PYTHONS ?= 3.10 3.11 3.12 3.13
ON_EACH_PYTHON := tests/test_structure.py tests/test_config.py tests/protocol/test_protocol.py tests/protocol/test_rules.py \
	tests/cli tests/postgres/test_encode.py tests/kafka/test_record_batch.py tests/mysql/test_types.py \
	tests/spark/test_spark.py::test_driver_and_executors_killed_and_restarted

test-pythons: $(addprefix python-,$(PYTHONS))

python-%: pyproject.toml | java
	@if ! python$* -c '' 2>/dev/null; then echo "python$* is not on the PATH: not tested"; exit 0; fi; \
	venv=.cache/python/$*; set -e; \
	[ $$venv/.ready -nt $< ] || { python$* -m venv $$venv; \
		$$venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'; touch $$venv/.ready; }; \
	echo "on $$($$venv/bin/python --version)"; \
	PYSPARK_PYTHON= PYSPARK_DRIVER_PYTHON= $$venv/bin/python -m pytest $(ON_EACH_PYTHON) $(ARGS)

bench: java $(READY)
	@for system in $(BENCH); do $(BIN)/python -m benchmarks.$$system $(ARGS) || exit 1; done

chaos: java $(READY) $(CLASSES)
	@$(BIN)/python -m tests.chaos $(ARGS)

# The simulator, with new seeds until Ctrl-C.
soak: $(READY)
	@$(BIN)/python -m tests.simulation soak -j $(shell nproc)

model:
	@$(PYTHON) docs/model/check.py $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

# The site has an environment of its own: nothing that the tests or the product need.
docs: .cache/docs-venv/.ready
	@.cache/docs-venv/bin/kubernetes-validate --strict --quiet examples/deploy/*.yaml
	@.cache/docs-venv/bin/python docs/site/build.py

.cache/docs-venv/.ready: docs/site/requirements.txt
	@$(PYTHON) -m venv .cache/docs-venv
	@.cache/docs-venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEMO): pyproject.toml
	@echo "installing Spark, PostgreSQL and its driver into .venv, once: 1.0 GB, one or two minutes"
	$(call install,demo)
	@$(COMPILE)
	@touch $@

$(READY): pyproject.toml
	@echo "installing Spark, drivers and servers for the tests into .venv, once: 1.7 GB, two or three minutes"
	$(call install,dev)
	@touch $@ $(DEMO)

# Into the one environment, which grows. Modules are compiled when they are first imported, since most never are.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "Python 3.10 or newer is needed; $(PYTHON) is: $$($(PYTHON) --version 2>&1). Choose another: make PYTHON=…" >&2; exit 1; }
@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv || \
	{ echo "$(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
@$(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile) \
	--editable '.[$(1)]'
endef

$(CLASSES): $(READY) tests/jvm.py | java
	@echo "archiving the classes of Spark and of Kafka and compiling pyspark, once, so that tests start them faster"
	@mkdir -p $(@D); $(BIN)/python -m tests.jvm >$@.log 2>&1 || echo "that failed, so tests take longer: see $@.log" >&2

java:
	@version=$$("$(JAVA)" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1); \
	[ "$${version:-0}" -ge 17 ] || \
		{ echo "Java 17 or newer is needed; $(JAVA) is: $${version:-missing}. Choose another: make JAVA_HOME=…" >&2; exit 1; }
