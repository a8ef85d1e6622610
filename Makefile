# Every target makes its own .venv first: `make train` with what training needs, the others with all that tests need.
# torch is installed before the project: constraints.txt pins the build, pins.txt the version of everything else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRAINS := $(VENV)/.trains
READY := $(VENV)/.ready
# pip warns of each attempt to reach an index that it is configured with, however quiet it is asked to be.
SHELL := /bin/bash
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --quiet
ALL_EXTRAS := .[train,hf,lora,jax,stream,privacy,ray,slurm,kubernetes,dashboard,tensorboard,wandb,trackio,mlflow,prometheus,lightning,s3,dev]
UNWARNED := 2> >(grep --invert-match --line-buffered '^WARNING: ' >&2)

# How often `make fuzz` searches, each time with a fresh seed.
ROUNDS ?= 1

.PHONY: train test fuzz test-long test-faults test-gpu test-browser test-clients check reference docs benchmarks pins clean

train: $(TRAINS)
	$(BIN)/isthmus train examples/gpt-stdlib.toml

SIDE_BY_SIDE := --numprocesses 3 --dist loadfile --no-loadscope-reorder
test: $(READY)
	$(BIN)/pytest $(SIDE_BY_SIDE)

# Property tests with fresh seeds; what fails is kept in tests/kept_examples, and `make test` tries it first.
fuzz: $(READY)
	for round in $$(seq $(ROUNDS)); do \
		$(BIN)/pytest --numprocesses 2 -m hypothesis --hypothesis-profile=fuzz || exit 1; \
	done

# What takes too long for every time. PART=3/12: every twelfth of those tests, beginning with the third.
PART ?= 1/1
# To collect the other files takes a minute.
LONG_FILES = $(shell grep --recursive --files-with-matches --include='test_*.py' -E 'mark\.(long|thorough)|represented_by' tests)
test-long: $(READY)
	ISTHMUS_FAULTS=1 $(BIN)/pytest -m "long or thorough" --part $(PART) $(SIDE_BY_SIDE) $(LONG_FILES)

# The same, and each fault at twenty moments.
test-faults: test-long
	$(BIN)/python -m tests.faults.table

# Everything that has a GPU side, on this machine's accelerator; ISTHMUS_GPU names another than the first.
test-gpu: $(READY)
	$(BIN)/python -m tests.gpu

# The page in a browser: Debian's chromium (apt-get install chromium), or the one that ISTHMUS_CHROMIUM names.
test-browser: $(READY)
	$(PIP) -c pins.txt -e ".[browser]" $(UNWARNED)
	ISTHMUS_BROWSER=1 $(BIN)/pytest tests/browser

# The endpoint as OpenAI's client and others use it, each installed in an environment of its own.
test-clients: $(READY)
	ISTHMUS_CLIENTS=1 $(BIN)/pytest tests/clients

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m tests.budgets

# Pages that are made from the code: of docs/reference, and docs/state-machines.md.
reference: $(READY)
	$(BIN)/python docs/write_reference.py

# The site, in site/. A warning or a link to nothing ends it.
docs: $(READY)
	$(PIP) -c pins.txt -e ".[docs]" $(UNWARNED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

benchmarks: $(READY)
	for run in benchmarks/*/run.py; do $(BIN)/python $$run || exit 1; done

$(TRAINS): pyproject.toml constraints.txt pins.txt
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch (`tail -n 1 constraints.txt`; see constraints.txt): 200 MB to download ..."
	@$(PIP) -r constraints.txt $(UNWARNED)
	@echo "installing Isthmus and what training needs: 90 MB ..."
	@$(PIP) -c pins.txt -e ".[train]" $(UNWARNED)
	touch $(TRAINS)

$(READY): $(TRAINS) testing/pyproject.toml
	@echo "installing what tests need: 380 MB ..."
	@$(PIP) -c pins.txt -e "$(ALL_EXTRAS)" -e testing $(UNWARNED)
	touch $(READY)

# The newest versions that pyproject.toml allows, in an environment of their own; `make test` says whether they serve.
pins:
	rm -rf .pins && $(PYTHON) -m venv .pins && sed -n '/^#/p' pins.txt > .pins/pins.txt
	.pins/bin/pip --quiet install -r constraints.txt
	.pins/bin/pip --quiet install -c constraints.txt "$(ALL_EXTRAS)"
	.pins/bin/pip freeze --exclude isthmus | sed 's/+cpu$$//' >> .pins/pins.txt
	mv .pins/pins.txt pins.txt && rm -rf .pins

clean:
	rm -rf $(VENV) runs
