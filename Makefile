# `make demo` and `make test` set themselves up; a second run installs nothing.
# Exact versions come from configs/constraints*.txt (Python 3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
COLAB := .venv-colab/bin
# Colab has Python 3.13: from the path (where pyenv may have a shim for none), or from pyenv.
COLAB_PYTHON ?= $(firstword $(shell python3.13 -c 'import sys; print(sys.executable)' 2>/dev/null) \
  $(wildcard $(HOME)/.pyenv/versions/3.13.*/bin/python3.13))
QUICKSTART := notebooks/01_quickstart.ipynb

# What Colab has of what SpeedKit asks for.
ON_COLAB := torch ipython ipykernel ipywidgets ipyparallel torchao transformers numpy scipy matplotlib \
  pydantic pyyaml platformdirs psutil cloudpickle scikit-learn setuptools

# What depends on the machine is tested as on others too, besides `quick`, which pins a plain CPU.
DEPENDING := notebook state step right rounds search panel
ON_MACHINES := $(addprefix tests/,rounds/test_inside.py catalog/test_precision.py catalog/test_grad_scaler.py \
  rounds/test_benchmark.py notebook/test_speedbench.py notebook/test_speedkit.py \
  search/test_search.py search/test_learning.py panel/test_panel.py)
# The oldest torch that the package declares, Colab's, and the newest that there is.
TORCHS := 2.9.0 2.11.0 newest

# What needs optional packages, which lie beside .venv: transformers imports torchao where it is.
OPTIONAL := tests/catalog/test_catalog.py tests/extras/by_request

.PHONY: demo test quick machines profiles slow optional thorough lint notebooks browser colab versions gpu benchmarks clean

demo: .venv/installed
	@echo "Running $(QUICKSTART): about half a minute."
	@$(BIN)/python notebooks/run.py $(QUICKSTART)
	@echo "Open it yourself:  $(BIN)/jupyter lab $(QUICKSTART)"

test: lint quick machines slow optional notebooks browser colab

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

quick: .venv/installed
	$(BIN)/pytest

# The same tests as for other machines, and for this very one: with `machines` what is marked
# `every_machine` on each and every other test on one of them, with `profiles` all on each.
NEITHER := -m "not (browser or slow or thorough or kernel or compile or real_time)"
machines: .venv/installed
	$(BIN)/pytest -q --profile bf16,fp16,one_core,here $(NEITHER) $(ON_MACHINES)

profiles: .venv/installed
	for profile in bf16 fp16 one_core here; do \
	  $(BIN)/pytest -q --profile $$profile $(NEITHER) $(addprefix tests/,$(DEPENDING)) || exit 1; done

slow: .venv/installed
	$(BIN)/pytest -m "slow and not thorough"

optional: .venv/optional/installed
	PYTHONPATH=.venv/optional $(BIN)/pytest -q -m "not thorough" $(OPTIONAL)

# The rest of the long lists, some minutes: before a release, and after work on what they test.
thorough: .venv/installed
	$(BIN)/pytest -m thorough
	$(BIN)/pytest -m "hypothesis and not browser" --hypothesis-profile thorough

# Two at a time, each with one thread: with two each they would wait for one another. So it is in
# the browser. The last notebook is the longest: beside all others, not after them.
notebooks: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest --dist loadfile -p no:cacheprovider -p nbval --nbval-lax \
	  --nbval-current-env --nbval-sanitize-with=configs/nbval.cfg --nbval-cell-timeout=900 --no-loadscope-reorder \
	  $(shell ls -r notebooks/*.ipynb) notebooks/test_stored_outputs.py

# The panel in JupyterLab and a headless Chromium, which root gets from Debian where there is none.
browser: .venv/installed
	@command -v chromium chromium-browser google-chrome >/dev/null || test "$$(id -u)" != 0 \
	  || ! command -v apt-get >/dev/null \
	  || { apt-get update -qq; apt-get install -y -qq --no-install-recommends \
	       chromium fonts-dejavu-core; } \
	  || echo "Chromium could not be installed: the browser tests are skipped."
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "browser and not thorough" tests/browser

# A part of magics and panel under the versions that Colab has, and what installing adds to them.
ifneq ($(COLAB_PYTHON),)
colab: .venv-colab/installed
	$(COLAB)/pytest tests/notebook tests/panel -m "smoke and not compile"
	$(COLAB)/pytest -n 0 -m slow tests/test_installing.py
else
colab:
	@echo "Skipped: Colab has Python 3.13, which is not here (COLAB_PYTHON=/path/to/python3.13)."
endif

# The quick part with other versions of torch. Each takes a .venv of its own of some gigabytes.
versions: $(TORCHS:%=.venv-torch-%/installed)
	for torch in $(TORCHS); do \
	  echo "torch $$torch:"; .venv-torch-$$torch/bin/python -m pytest -q || exit 1; done

gpu: .venv/installed
	$(BIN)/pytest -n 0 -m gpu --profile here

# Without truth.py, oracle.py, catalog.py and scale.py, which take half an hour to two and can be stopped and
# resumed.
benchmarks: .venv/installed
	for program in $(filter-out %/truth.py %/oracle.py %/catalog.py %/scale.py,$(wildcard tests/benchmarks/[a-z]*.py)); do \
	  $(BIN)/python $$program || exit 1; done

.venv/installed: pyproject.toml configs/constraints.txt
	@echo "Installing into .venv: some minutes, once."
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check \
	  --constraint configs/constraints.txt --editable '.[test]'
	@touch $@

.venv/optional/installed: .venv/installed
	@$(BIN)/pip install --quiet --disable-pip-version-check --target .venv/optional --upgrade \
	  --no-deps --constraint configs/constraints.txt torchao
	@touch $@

.venv-colab/installed: pyproject.toml configs/constraints-colab.txt
	@echo "Installing into .venv-colab: some minutes, once."
	@$(COLAB_PYTHON) -m venv --clear .venv-colab
	@$(COLAB)/pip install --quiet --disable-pip-version-check \
	  --constraint configs/constraints-colab.txt $(ON_COLAB)
	@$(COLAB)/pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --dry-run --report .venv-colab/report.json '.[autotune,processes,quantization]'
	@$(COLAB)/pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --constraint configs/constraints-colab.txt --editable '.[autotune,processes,quantization]' \
	  nbclient pytest pytest-xdist hypothesis expecttest
	@touch $@

# Without the constraints of torch and of what depends on its version.
.venv-torch-%/installed: pyproject.toml configs/constraints.txt
	@echo "Installing into .venv-torch-$*: some gigabytes, once."
	@$(PYTHON) -m venv .venv-torch-$*
	@grep -vE '^(torch|triton|setuptools)==' configs/constraints.txt > .venv-torch-$*/constraints.txt
	@.venv-torch-$*/bin/pip install --quiet --disable-pip-version-check \
	  --constraint .venv-torch-$*/constraints.txt --editable '.[test]' \
	  $(if $(filter newest,$*),--upgrade torch,torch==$*)
	@touch $@

clean:
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
