# Every target makes its own .venv first. torch is installed before the project: constraints.txt pins the build.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test test-faults check benchmarks clean

train: $(READY)
	$(BIN)/isthmus train examples/gpt-stdlib.toml

test: $(READY)
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# What takes too long for every time, and each fault at twenty moments, over real processes.
test-faults: $(READY)
	ISTHMUS_FAULTS=1 $(BIN)/pytest tests/faults tests/fleet_service/test_fleet_faults.py tests/fleet_service/test_far_sites.py tests/fleet_service/test_islands.py
	$(BIN)/python -m tests.faults.table

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

benchmarks: $(READY)
	for run in benchmarks/*/run.py; do $(BIN)/python $$run || exit 1; done

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e ".[train,hf,privacy,dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) runs
