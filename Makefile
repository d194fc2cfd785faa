# Two commands: `make demo` and `make test`. Both make .venv first if it is missing or out of date.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.PHONY: demo test pictures clean

demo: $(VENV)/installed
	$(BIN)/mini-engine demo

test: $(VENV)/installed
	$(BIN)/mini-engine models fetch smollm2 || echo "without SmolLM2: its tests are skipped"
	$(BIN)/pytest --nbval notebooks
	$(BIN)/pytest

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet --editable '.[dev]' --constraint constraints.txt
	touch $@

# The README's pictures, made anew (the second needs Chromium).
pictures: $(VENV)/installed
	$(BIN)/mini-engine demo
	cp out/timeline.png docs/images/timeline.png
	$(BIN)/python -m mini_engine.show.player.screenshot docs/images/player.png

clean:
	rm -rf $(VENV) out
