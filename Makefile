# `make` says what there is. What runs anything makes .venv first if it is missing or out of date.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# One more than the cores: some tests wait for a browser or a clock.
JOBS ?= 3
PYTEST := $(BIN)/pytest -n $(JOBS) --dist worksteal
# Here labs check keeps what the labs' tests did with every known mistake, until something they read changes.
# It also runs the labs' own tests of solution.py and of the engine's parts.
KEPT := out/check
TESTED := labs/kit mini_engine
# Tests start hundreds of processes, which would compile the course anew each time.
unexport PYTHONDONTWRITEBYTECODE

# $(call stage,NAME,COMMAND): a line of output, and all that the command said if it fails. In one piece,
# for two may run at a time.
stage = @mkdir -p out; said="$$($(2) 2>&1)" && printf '%-50s ok\n' '$(1)' || { printf '%-50s FAILED\n%s\n' '$(1)' "$$said"; exit 1; }

.PHONY: help demo test test-fast soak mutants check lint promises notebooks docs pictures pages audit clean

help:
	@echo 'make demo        watch a language model serve nine requests at once'
	@echo 'make test        everything that is claimed, proved: check, the notebooks, all tests; ten minutes'
	@echo 'make test-fast   while you edit: the engine and the labs, in less than a minute'
	@echo 'make soak        long proofs, an hour or two: a million random steps, faults, damaged files; counts'
	@echo 'make mutants     the core with one thing wrong at a time: do the tests notice?'
	@echo 'make check       formatting, lint, types, layers, and what the labs promise'
	@echo 'make docs        the book, and with npm labs to write in a web page, into docs/_build/site'
	@echo 'make pages       the labs to write in a web page alone, in out/pages; it needs npm'
	@echo 'make pictures    the pictures of the READMEs, made anew'
	@echo 'make audit       what is known against the pinned packages, and their list, out/sbom.json'
	@echo 'make clean       away with .venv and out'

demo: $(VENV)/installed
	@$(BIN)/mini-engine demo

# A learner's starter.py is work in progress; make check and CI want it as it was generated.
test: LEARNING := $(if $(CI),,yes)
# The names of known mistakes, and the task that is blamed, are left to make check and make soak.
test: QUICK := --quick
test: $(VENV)/installed  # two stages at a time, so that no core waits for the end of one
	@$(BIN)/mini-engine models fetch smollm2 || echo 'without SmolLM2: its tests are skipped'
	@$(MAKE) --no-print-directory --jobs 2 LEARNING=$(LEARNING) QUICK=$(QUICK) promises lint docs notebooks
	@echo 'tests'
	@SITE=docs/_build/site $(PYTEST) $(TESTED)

test-fast: $(VENV)/installed
	@echo 'the engine and the labs, without the kit, the known mistakes, figures, browser, bench and oracles'
	@$(PYTEST) mini_engine $(wildcard labs/lab-*) $(SLOW:%=--ignore=%)

# make soak SOAKING='...' plays other files only; docs/reliability.md has the counts.
SOAKING = $(patsubst %,mini_engine/tests/test_%.py,\
	baselines bench cli cluster conformance draft_model every_call faults fast figures fork input_errors isolation \
	kv_connector machines oracle_engine oracle_model oracle_sampling player replicas serve serve_rough shakespeare simulate \
	speculation speculation_equality structured tensor_parallel) \
	$(patsubst %,labs/kit/tests/test_%.py,\
	arena browser browser_site cli diagnose dials docs edition front_page grader_attacks grader_evasions grader_gradescope grader_honest \
	grader_imports grader_known grader_later_labs grader_pool grader_shapes guard isolate notebook panel parts \
	random_scripts sentences)

soak: $(VENV)/installed
	@$(BIN)/python -m mini_engine.tests.soak
	$(call stage,labs check: every test on every known mistake,$(BIN)/python -m labs check --whole)
	@SOAK=1 $(PYTEST) -m '' --timeout 1800 $(wildcard $(SOAKING)); rc=$$?; $(BIN)/python -m mini_engine.tests.soak --print; exit $$rc

mutants: $(VENV)/installed
	@$(BIN)/python -m mini_engine.tests.mutants

SPHINX := $(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet \
	--conf-dir docs --doctree-dir docs/_build/doctrees .

OTHERS = $(if $(LEARNING),--exclude 'labs/*/starter.py')
STRICT = $(if $(LEARNING),,--strict)

SLOW := $(patsubst %,mini_engine/tests/test_%.py,\
	bench cli fast figures oracle_engine oracle_model oracle_sampling player shakespeare simulate supply wheel)

check: lint promises

lint: $(VENV)/installed
	$(call stage,ruff format: how the code is laid out,$(BIN)/ruff format --check . $(OTHERS))
	$(call stage,ruff check: what is known to go wrong,$(BIN)/ruff check . $(OTHERS))
	$(call stage,mypy: types,$(BIN)/mypy)
	$(call stage,import-linter: imports go down only,$(BIN)/lint-imports --no-logo)

promises: $(VENV)/installed
	@echo 'labs check plays the known mistakes of each lab that has changed ...'
	$(call stage,labs check: starters fail and mistakes are caught,$(BIN)/python -m labs check $(STRICT) $(QUICK) --keep $(KEPT))

notebooks: $(VENV)/installed
	$(call stage,notebooks: every cell gives what is saved,$(BIN)/pytest -n 2 --dist loadfile --nbval notebooks)

docs: $(VENV)/installed
	$(call stage,book: every page and link,$(SPHINX) docs/_build/site)
	@$(BIN)/python -m labs.kit.browser.site docs/_build/site
	@echo 'look at it with: python -m labs open'

$(VENV)/installed: pyproject.toml constraints.txt
	@test -x $(BIN)/pip || { echo 'making $(VENV)'; $(PYTHON) -m venv --clear $(VENV) || exit 1; }
	@echo 'installing what it needs (a few minutes) ...'
	@$(BIN)/pip install --disable-pip-version-check --no-compile --editable '.[dev]' --constraint constraints.txt \
		> $(VENV)/log 2>&1 || { cat $(VENV)/log; exit 1; }
	@touch $@

# Those of the player need Chromium.
pictures: $(VENV)/installed
	@$(BIN)/mini-engine demo
	@cp out/timeline.png docs/images/timeline.png
	@for picture in docs/images/*.py; do $(BIN)/python $$picture || exit 1; done
	@$(BIN)/python -m labs.kit.author.pictures

pages: $(VENV)/installed
	@$(BIN)/python -m labs.kit.browser.build out/pages

# Asks PyPI about each pinned package, and installs none of them. The list is CycloneDX.
audit: $(VENV)/installed
	@$(BIN)/pip install --disable-pip-version-check --quiet --editable '.[supply]' --constraint constraints.txt
	@mkdir -p out
	@$(BIN)/cyclonedx-py requirements constraints.txt --pyproject pyproject.toml --output-reproducible \
		--output-file out/sbom.json
	@$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

clean:
	rm -rf $(VENV) out docs/_build
