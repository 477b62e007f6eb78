# make demo   train the example
# make test   lint, type-check and test
# make lint   lint and type-check only
# make test-oldest   the tests on the oldest supported versions (needs a Python 3.10 to 3.12)
# make clean  remove the virtual environment and every cache

VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-oldest lint clean

demo: $(INSTALLED)
	$(PYTHON) examples/segmentation.py

# pytest comes last, so that its summary is the last line.
test: lint
	$(PYTHON) -m pytest -n 2

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy tf_gradscale

$(INSTALLED): setup.cfg pyproject.toml | $(PYTHON)
	$(PYTHON) -m pip install --quiet --editable '.[test,examples]'
	touch $@

# Each candidate is run, not only looked up: it may be a stub of a version manager, too old, or lack
# venv (a package of its own on Debian).
$(PYTHON):
	@for python in python3.13 python3.12 python3.11 python3.10 python3; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' \
	        >/dev/null 2>&1; then \
	        echo "$$python -m venv $(VENV)"; \
	        exec $$python -m venv $(VENV); \
	    fi; \
	done; \
	echo "Expected a Python >= 3.10 with venv on the PATH; install one. Received: none." >&2; \
	exit 1

# The lower bounds of setup.cfg; Python 3.13 has no TensorFlow that old.
OLDEST := .venv-oldest
test-oldest: PYTHON_OLDEST ?= python3.11
test-oldest:
	test -d $(OLDEST) || $(PYTHON_OLDEST) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --editable '.[test,examples]' \
	    'tensorflow==2.18.*' 'keras==3.10.*'
	$(OLDEST)/bin/python -m pytest -n 2

clean:
	rm -rf $(VENV) $(OLDEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
