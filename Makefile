# `make attack` runs the demo, `make test` runs lint, types and tests; each sets up all it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO ?= results/demo

.PHONY: attack test test-federated test-cluster results-check setup lint types bench clean

attack: $(INSTALLED)
	$(BIN)/python run_attack.py configs/demo.yaml --out $(DEMO) --fresh
	$(BIN)/python report.py $(DEMO) --out $(DEMO)/report
	@echo "pictures and tables: $(DEMO)/report (open index.html)"

# A process for each core (tests/conftest.py: and for 3 GiB of memory), each with one thread; then
# what wants the machine for itself: clusters (tests/slow) and real models (tests/golden).
test: lint types
	$(BIN)/python -m pytest -n auto --dist loadfile --ignore=tests/slow --ignore=tests/golden
	$(BIN)/python -m pytest tests/slow tests/golden

# The same federation under Flower's real engines; they are a large install, so apart from `test`.
test-federated: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,dp,federated]'
	$(BIN)/python -m pytest tests/slow/test_flower.py tests/federation tests/client/test_accounting.py

# Runs by several processes, on clusters of this machine: Ray's, and Slurm's where it is installed
# (Debian: apt install slurmctld slurmd slurm-client munge).
test-cluster: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray,slurm]'
	$(BIN)/python -m pytest -rs tests/slow --ignore=tests/slow/test_flower.py

# Every published figure is computed again from its rows; WRITE=1 writes tables and figures again.
results-check: $(INSTALLED)
	$(BIN)/python -m mjp_privacy.report.results.claims $(if $(WRITE),--write)

setup: $(INSTALLED)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

bench: $(INSTALLED)
	for name in april pipeline scores lattice start workers growth; do \
	  $(BIN)/python -W ignore -m benchmarks.$$name || exit 1; done
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.report
	$(BIN)/python -m benchmarks.page

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
