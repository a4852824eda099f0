# make demo: from real proteins to a trained model and embeddings.   make test: all that CI checks.
PYTHON ?= python3
VENV ?= .venv
DEMO ?= demo
JOBS ?= 2
FUZZ_INPUTS ?= 200000
PYTEST = OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test quick fuzz format constraints clean

help:
	@echo "make install      make $(VENV) with protperf and its tools"
	@echo "make demo         real proteins -> shards -> model -> embeddings -> figures, in demo/ (minutes on two cores)"
	@echo "make test         format, lint, types and all tests, as CI runs them"
	@echo "make quick        the same without the slow tests"
	@echo "make fuzz         give hostile files to the readers, FUZZ_INPUTS=200000 in all (half an hour on one core)"
	@echo "make format       rewrite the code as the formatter wants it"
	@echo "make constraints  pin the newest versions of all dependencies in constraints.txt"

install: $(BIN)/.installed

# torch comes first: a CPU build that is already in the environment, or that pip finds by its exact version, is kept.
$(BIN)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "protperf needs Python 3.10 to 3.13; $(PYTHON) is $$($(PYTHON) --version): make install PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	@PATH="$(abspath $(BIN)):$$PATH" bash docs/demo.sh $(DEMO)

test: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST)

quick: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow"

fuzz: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --inputs $(FUZZ_INPUTS)

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One version of torch for everybody; its CUDA libraries follow it by themselves, and pinning them would break CPU builds.
constraints: install
	$(BIN)/pip install --quiet uv
	echo "torch==2.13.0" > torch.pin
	$(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --no-emit-index-url --all-extras --upgrade \
		--constraint torch.pin --no-emit-package torch --no-emit-package triton --python-version 3.10 pyproject.toml \
		| grep -v '^nvidia-\|^cuda-' | sort - torch.pin > constraints.txt
	rm torch.pin

clean:
	rm -rf build dist demo *.egg-info
