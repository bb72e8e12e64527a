# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
SOURCES := $(shell find src -name '*.py' 2>/dev/null)

.PHONY: demo test tiny lint bench clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(RUN) -m pip install -q -c constraints.txt -e '.[test,dev]'
	touch $@

demo: $(VENV)/.installed
	$(RUN) examples/demo.py

test: $(VENV)/.installed
	$(RUN) -m pytest -n 2 tests

tiny: $(VENV)/.installed
	$(RUN) -m pytest tests/test_tiny.py

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check src tests bench examples
	$(VENV)/bin/mypy

bench: $(VENV)/.installed
	$(RUN) bench/reference.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info
