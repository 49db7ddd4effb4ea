# `make demo` and `make test` set themselves up; a second run installs nothing.
# Exact versions come from configs/constraints*.txt (Python 3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
COLAB := .venv-colab/bin
QUICKSTART := notebooks/01_quickstart.ipynb

.PHONY: demo test quick slow lint notebooks browser colab gpu benchmarks clean

demo: .venv/installed
	@echo "Running $(QUICKSTART): about half a minute."
	@$(BIN)/python notebooks/run.py $(QUICKSTART)
	@echo "Open it yourself:  $(BIN)/jupyter lab $(QUICKSTART)"

test: lint quick slow notebooks browser colab

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

quick: .venv/installed
	$(BIN)/pytest

slow: .venv/installed
	$(BIN)/pytest -m slow

notebooks: .venv/installed
	$(BIN)/pytest -n 0 -p no:cacheprovider --nbval-lax --nbval-current-env \
	  --nbval-sanitize-with=configs/nbval.cfg --nbval-cell-timeout=120 notebooks/

# The panel in JupyterLab and a headless Chromium, which root gets from Debian where there is none.
browser: .venv/installed
	@command -v chromium chromium-browser google-chrome >/dev/null || test "$$(id -u)" != 0 \
	  || ! command -v apt-get >/dev/null \
	  || { apt-get update -qq; apt-get install -y -qq --no-install-recommends \
	       chromium fonts-dejavu-core; } \
	  || echo "Chromium could not be installed: the browser tests are skipped."
	$(BIN)/pytest -n 0 -m browser tests/browser

# A part of magics and panel under what Colab and Kaggle ship (IPython 7.34, ipywidgets 7.7).
colab: .venv-colab/installed
	$(COLAB)/pytest -n 0 tests/magics tests/widgets -m "smoke and not compile"

gpu: .venv/installed
	$(BIN)/pytest -n 0 -m gpu

# Without truth.py and oracle.py, which take half an hour and can be stopped and resumed.
benchmarks: .venv/installed
	for program in $(filter-out %/truth.py %/oracle.py %/_ratios.py %/_workloads.py,$(wildcard tests/benchmarks/*.py)); do \
	  $(BIN)/python $$program || exit 1; done

.venv/installed: pyproject.toml configs/constraints.txt
	@echo "Installing into .venv: some minutes, once."
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check \
	  --constraint configs/constraints.txt --editable '.[test]'
	@touch $@

.venv-colab/installed: pyproject.toml configs/constraints-colab.txt
	@echo "Installing into .venv-colab: some minutes, once."
	@$(PYTHON) -m venv .venv-colab
	@$(COLAB)/pip install --quiet --disable-pip-version-check \
	  --constraint configs/constraints-colab.txt --editable . \
	  ipykernel nbclient pytest pytest-xdist hypothesis setuptools
	@touch $@

clean:
	rm -rf .venv .venv-colab .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
