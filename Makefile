# make demo: from real proteins to a trained model and embeddings.   make test: all that CI checks.
PYTHON ?= python3
VENV ?= .venv
DEMO ?= demo
SITE ?= build/site
JOBS ?= 2
PIP_INSTALL ?= pip install
FUZZ_INPUTS ?= 200000
PYTEST = OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo lint test quick fuzz docs format constraints dist licences sbom audit try-wheel clean

help:
	@echo "make install      make $(VENV) with protperf and its tools"
	@echo "make demo         real proteins -> shards -> model -> embeddings -> figures, in demo/ (minutes on two cores)"
	@echo "make test         format, lint, types, docs and all tests, as CI runs them"
	@echo "make quick        the same without the slow tests"
	@echo "make fuzz         give hostile files to the readers, FUZZ_INPUTS=200000 in all (ten minutes on one core)"
	@echo "make docs         the site of docs/, in build/site; a warning is an error"
	@echo "make format       rewrite the code as the formatter wants it"
	@echo "make lint         format, lint and types alone"
	@echo "make constraints  pin the newest versions of all dependencies in constraints.txt"
	@echo "make dist         source archive, wheel, and the licences and bill of materials of what it needs, in dist/"
	@echo "make licences     list the licences of all dependencies; fail on one that does not go with protperf's"
	@echo "make audit        ask the database of known vulnerabilities about every pin (needs the network)"
	@echo "make try-wheel    install dist/*.whl alone into an empty environment and run it there"

install: $(BIN)/.installed

# torch comes first: a CPU build that is already in the environment, or that pip finds by its exact version, is kept.
$(BIN)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "protperf needs Python 3.10 to 3.13; $(PYTHON) is $$($(PYTHON) --version): make install PYTHON=python3.12"; exit 1; }
	@echo "installing protperf and its tools into $(VENV): some minutes without a word"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP_INSTALL) --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/$(PIP_INSTALL) --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	@PATH="$(abspath $(BIN)):$$PATH" bash docs/demo.sh $(DEMO)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(PYTEST)

quick: lint
	$(PYTEST) -m "not slow"

fuzz: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --inputs $(FUZZ_INPUTS)

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

# Of which environment licences and materials are listed: by default this one, which has all extras and the tools for developing.
OF ?= $(BIN)/python
# One with the wheel and what it needs, and nothing else, not even pip: what somebody has who installs it.
WHEEL := build/wheel

dist: install
	rm -rf dist $(WHEEL)
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m venv --without-pip $(WHEEL)
	$(BIN)/pip --python $(WHEEL)/bin/python install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip --python $(WHEEL)/bin/python install --quiet --constraint constraints.txt dist/*.whl
	$(MAKE) licences sbom OF=$(WHEEL)/bin/python

licences: install
	@mkdir -p dist
	$(BIN)/pip-licenses --python=$(OF) --format=markdown --with-urls --output-file=dist/licences.md
	$(BIN)/pip-licenses --python=$(OF) --summary

sbom: install
	@mkdir -p dist
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type application --output-reproducible \
		--output-file dist/sbom.cdx.json $(OF)

# --strict: a pin that the database does not know is a failure, not a pass.
audit: install
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

try-wheel:
	PYTHON=$(PYTHON) .ci/try-wheel dist/protperf-*.whl

clean:
	rm -rf build dist demo *.egg-info
