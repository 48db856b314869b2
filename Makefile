# The commands: run, test, spark, build, lint, check, pythons, bench, steady, wheel, wheel-test, docs, pictures, stress, fuzz, audit, model, torture, clean. Each sets up what it needs.

# PYTHON=/path/to/python3.13 picks an interpreter; each but python3 has an environment of its own, named by its version.
PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(shell $(PYTHON) -c 'import platform; print(platform.python_version())'))
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
SOURCES := pyproject.toml CMakeLists.txt $(shell find native -type f -not -path 'native/tests/*' 2>/dev/null)
PYTEST := $(BIN)/python -m pytest
JOBS ?= 2
CONSTRAINTS ?= constraints.txt
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)

.PHONY: run test spark build check lint pythons bench steady wheel wheel-test stress fuzz audit model torture docs pictures clean tools system

run: build
	@echo "running the demo for a minute: $(BIN)/penstock demo"
	@$(BIN)/penstock demo

build: $(STAMP)/built

# What the machine must have; a missing one is named with its remedy.
tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "penstock needs Python 3.11 or newer as $(PYTHON); install it, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) lacks venv; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || \
	  { echo "penstock builds its core with a C++20 compiler and none was found; on Debian or Ubuntu: apt-get install g++"; exit 1; }

# $(call step,what is done,command): one line, with the time it took; when it fails, what it printed.
step = @scripts/step.sh "$(1)" $(2)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(STAMP)/venv:
	@$(MAKE) --no-print-directory tools
	$(call step,making an environment for Python in $(VENV),$(PYTHON) -m venv $(VENV))
	$(call step,updating pip in it,$(PIP) --upgrade pip)
	@mkdir -p $(STAMP) && touch $@

$(STAMP)/dependencies: $(STAMP)/venv pyproject.toml $(CONSTRAINTS)
	@$(BIN)/python scripts/requirements.py > $(STAMP)/requirements.txt
	$(call step,installing what penstock and its tests need (minutes the first time),$(PIP) -r $(STAMP)/requirements.txt $(addprefix -c ,$(CONSTRAINTS)))
	@touch $@

$(STAMP)/built: $(STAMP)/dependencies $(SOURCES)
	$(call step,compiling the native core,$(PIP) --no-build-isolation --no-deps -e .)
	@touch $@

# Servers and tools from the system's packages that some tests use: installed when root on Debian, named when not.
PACKAGES := redis-server mosquitto chromium chromium-driver nftables iproute2 spin
system:
	@sh scripts/system_packages.sh $(PACKAGES)

# Without the long ones, which `make stress` runs.
test: build system
	@$(BIN)/python scripts/suite.py -- $(ARGUMENTS)

# The tests of Spark alone: those that start JVMs of their own beside those that share one session.
spark: build system
	@$(BIN)/python scripts/suite.py "spark and not jvm" "spark and jvm" -- $(ARGUMENTS)

lint: build
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-cache

# The tests, and beside them some of the tests on the other Pythons at hand.
check: lint
	@$(MAKE) --no-print-directory -j2 test pythons

pythons: build
	@$(BIN)/python scripts/pythons.py $(SECONDS)

bench: build
	$(BIN)/python benchmarks/run.py $(ARGUMENTS)

# The tests under load, on one core, with a slow disk, in random order, as another user: what a release must pass.
steady: build system
	$(BIN)/python scripts/steady.py $(or $(PART),all) $(ARGUMENTS)

# The documents as a site with search and an API reference: build/site/index.html.
docs: build
	$(call step,installing what the site is built with,$(PIP) --group docs $(addprefix -c ,$(CONSTRAINTS)))
	$(call step,building the site,$(BIN)/python scripts/site.py)
	@echo "open build/site/index.html"

# The pictures of the documents, from a running demo.
pictures: build system
	$(BIN)/python scripts/pictures.py

# What is published: a wheel for each Python at hand (PYTHONS= names others) and the source distribution, in dist/.
wheel: build
	$(call step,installing auditwheel,$(PIP) --group wheel $(addprefix -c ,$(CONSTRAINTS)))
	@$(BIN)/python scripts/wheels.py $(PYTHONS)

# Each wheel in an environment of its own, without a compiler.
wheel-test: wheel
	$(PYTEST) tests/stress/test_wheel.py $(ARGUMENTS)

stress: build
	$(MAKE) -C native/tests PYTHON=../../$(BIN)/python
	$(PYTEST) tests/stress $(ARGUMENTS)
	$(PYTEST) tests/crash -m spark --kills 3 $(ARGUMENTS)
	$(PYTEST) tests/crash/test_lake_kill.py --kills 100 --timeout 0 $(ARGUMENTS)
	PENSTOCK_FUZZ=1000000 $(PYTEST) tests/fuzz $(ARGUMENTS)

# Coverage-guided fuzzing of the native decoders, SECONDS_EACH for each target (TARGETS names some); fails on a find.
fuzz: tools
	@sh scripts/system_packages.sh clang && sh scripts/system_packages.sh libclang-rt-$$(clang -dumpversion | cut -d. -f1)-dev
	$(MAKE) -C native/tests/fuzz PYTHON=$(PYTHON)

# What other people's tools find in the code: known holes of what is installed, cppcheck and clang-tidy over the native core.
# (ruff has bandit's rules: `make lint`.)
audit: build
	@sh scripts/system_packages.sh cppcheck clang-tidy
	$(PYTEST) tests/stress/test_audit.py -rs
	cppcheck --quiet --error-exitcode=1 --library=python --enable=warning,portability --std=c++20 --inline-suppr -j $(JOBS) \
	  -I native --suppress=cppcheckError:native/tcp/sending.cpp -i native/tests native
	find native -name '*.cpp' -not -path '*/tests/*' -print0 | \
	  xargs -0 -P $(JOBS) -n 1 clang-tidy --quiet -p $$(dirname $$(ls -t build/*/compile_commands.json | head -1))

# The lock-free algorithm of shared memory: the code itself under many schedules, a model of it in every interleaving.
model: system
	$(MAKE) -C native/tests/schedules
	$(MAKE) -C native/tests/model

# Every room tortured, with the results in docs/figures.md; then the crash tests. (Rooms whose kills take seconds get fewer.)
torture: build system
	$(BIN)/penstock torture --kills $(or $(KILLS),2000) --table docs/figures.md $(if $(SEED),--seed $(SEED))
	$(PYTEST) tests/crash -m "not spark" --kills $(or $(KILLS),2000) --timeout 0 $(ARGUMENTS)
	$(PYTEST) tests/crash -m spark --kills $$(( ($(or $(KILLS),2000) + 99) / 100 )) --timeout 0 $(ARGUMENTS)

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
