# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test test-pythons test-packages tiny lint goldens lines docs bench clean

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
	$(RUN) -m pytest -n 2 --durations=10 tests

# every Python from 3.11 on that this machine has, each in an environment of its own (.venv-3.12, ...)
test-pythons:
	$(PYTHON) tests/on_every_python.py

# 36 third-party packages, versions pinned, in an environment of its own
$(VENV)-packages/.installed: pyproject.toml constraints.txt
	test -x $(VENV)-packages/bin/python || $(PYTHON) -m venv $(VENV)-packages
	$(VENV)-packages/bin/python -m pip install -q -c constraints.txt -e '.[test,packages]'
	touch $@

test-packages: $(VENV)-packages/.installed
	$(VENV)-packages/bin/python -m pytest tests/packages

tiny: $(VENV)/.installed
	$(RUN) -m pytest tests/test_tiny.py

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check src tests bench examples
	$(VENV)/bin/mypy

# generated text of a few programs: read `git diff tests/goldens` like code
goldens: $(VENV)/.installed
	$(RUN) tests/golden_texts.py

# lines by folder in docs/README.md, by feature in docs/departures.md
lines:
	$(PYTHON) docs/lines.py

# docs/ as a site in site/
docs: $(VENV)/.installed
	$(RUN) -m pip install -q -c constraints.txt -e '.[docs]'
	$(RUN) -m mkdocs build --strict

bench: $(VENV)/.installed
	$(RUN) bench/reference.py

clean:
	rm -rf $(VENV) $(VENV)-* build dist site src/*.egg-info
