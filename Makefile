# Two commands on a fresh machine with Python 3.11, 3.12 or 3.13:
#   make demo   set up .venv, then stream the included model with less RAM than its weights
#   make test   set up .venv, then run the tests
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& { command -v $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := --quiet --disable-pip-version-check --no-compile

.PHONY: demo test sweep fast lint clean

demo: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python examples/demo.py

# A process per core and one thread in each: two OpenMP pools on the same cores wait for one another,
# and where a test asks for several threads they sleep as they wait: by default they spin, on a core
# that another process needs. A process that is done takes half of what another has left, so that all
# end together. Hundreds of programs are started: none should compile our modules again.
OPENMP := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive}

test: $(READY)
	$(OPENMP) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto \
		--maxprocesses 8 --dist worksteal -m "not sweep" $(PYTEST_ARGS)

# Every family of models, an hour or so: before a release.
sweep: $(READY)
	$(OPENMP) $(BIN)/python -m pytest -n auto --maxprocesses 8 \
		-m sweep $(PYTEST_ARGS)

# What a developer runs between edits.
fast: $(READY)
	$(BIN)/python -m pytest -m 'not slow and not sweep' -x -q

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first and by its exact version: left to the ranges of other packages, pip takes the newest
# build with several gigabytes of CUDA libraries. Modules are compiled as they are imported, and not
# all fifteen thousand by pip, one after the other: that was most of the time.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; set PYTHON=/path/to/python3"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP) --upgrade pip
	$(BIN)/python -m pip install $(PIP) torch==2.13.0
	$(BIN)/python -m pip install $(PIP) -e '.[dev,plot]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build dist
