# make demo: from real proteins to a trained model and embeddings.   make test: all that CI checks.
PYTHON ?= python3
VENV ?= .venv
DEMO ?= demo
SITE ?= build/site
JOBS ?= 2
PYTEST = OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test quick docs format constraints clean

help:
	@echo "make install      make $(VENV) with protperf and its tools"
	@echo "make demo         real proteins -> shards -> model -> embeddings -> figures, in demo/ (minutes on two cores)"
	@echo "make test         format, lint, types, docs and all tests, as CI runs them"
	@echo "make quick        the same without the slow tests"
	@echo "make docs         the site of docs/, in build/site; a warning is an error"
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

# tests/test_site.py builds it just so, follows its links and looks at it in a browser.
docs: install
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs $(SITE)
	@echo $(SITE)/index.html

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
