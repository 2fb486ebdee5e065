# `make attack` runs the demo, `make test` runs lint, types and tests; each sets up all it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO ?= results/demo

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# pip compiles on one core, a minute in all; this on every core. What nobody compiled each process
# would compile anew where PYTHONDONTWRITEBYTECODE is set.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib mjp_privacy attacks || true

ENGINES := $(VENV)/.engines
ROOMY := tests/slow  # clusters of many processes: not beside other tests

.PHONY: attack test tests test-engines test-federated test-cluster test-package nightly results-check setup
.PHONY: engines docs lint types bench clean

attack: $(INSTALLED)
	$(BIN)/python run_attack.py configs/demo.yaml --out $(DEMO) --fresh
	$(BIN)/python report.py $(DEMO) --out $(DEMO)/report
	@echo "pictures and tables: $(DEMO)/report (open index.html)"

# Lint first, then types beside the tests: a process for each core (tests/conftest.py: and for 3 GiB
# of memory), each with one thread. What is marked nightly or engine is left out (pyproject.toml).
test: lint
	$(MAKE) -j 2 types tests

tests: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal --ignore=$(ROOMY)

# One run from end to end by each of Flower, Ray and Slurm, what else needs these large installs, and
# the demo of the installed wheel: processes that mostly wait, so two go on beside each other.
# Slurm's is skipped where it is not installed (Debian: apt install slurmctld slurmd slurm-client munge).
test-engines: $(ENGINES)
	$(MAKE) -j 2 test-federated test-cluster test-package

test-federated: $(ENGINES)
	$(BIN)/python -m pytest -rs -m engine tests/slow/test_flower.py tests/federation

test-cluster: $(ENGINES)
	$(BIN)/python -m pytest -rs -m engine tests/engines

test-package: $(INSTALLED)
	$(BIN)/python -m pytest -rs -m engine tests/test_package.py

# Everything, some hours: all tests (hypothesis draws six times as many bad inputs), the newest versions of
# all packages, runs that are killed and damaged, and faults planted in the code, of which a test has to
# notice each.
# Seconds; all 9,600 faults take longer, and the next night goes on.
MUTATING ?= 7200
nightly: lint types $(ENGINES)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "" --hypothesis-profile=nightly --ignore=$(ROOMY)
	$(BIN)/python -m pytest -rs -m "" $(ROOMY)
	$(BIN)/python tools/test-environments python3 --out build/environments
	$(BIN)/python tools/crash-test --kills 100 --flips 50 --lost 10 --full 5 --read-only 4
	-timeout $(MUTATING) $(BIN)/mutmut run "mjp_privacy.metrics.*"
	-timeout $(MUTATING) $(BIN)/mutmut run "attacks.equations.*"
	$(BIN)/mutmut results

# Every published table is made again from its rows; WRITE=1 writes them.
results-check: $(INSTALLED)
	$(BIN)/python -m tools.publish tables $(if $(WRITE),--write)

# The documentation site, build/site/index.html; a link that leads nowhere is an error (of warnings
# that --quiet hides, mkdocs counts none).
docs: $(ENGINES)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "documentation: build/site/index.html"

setup: $(INSTALLED)

engines: $(ENGINES)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -W ignore -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.large_store "$$(mktemp -d)/run" --scores 5e5 --side 96 --report

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed; $(PYTHON) is `$(PYTHON) --version 2>&1`." \
	       "Give another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "$(PYTHON) cannot make virtual environments; install its venv package" \
	       "(Debian, Ubuntu: apt install python3-venv)."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	@$(COMPILE)
	@touch $@

# For the site too: each call of pip looks everything up again, half a minute.
$(ENGINES): $(INSTALLED)
	$(PIP) -e '.[dev,docs,federated,ray,slurm]'
	@$(COMPILE)
	@touch $@
