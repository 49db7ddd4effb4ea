# `make demo` and `make test` set themselves up; a second run installs nothing.
# Exact versions come from configs/constraints*.txt (Python 3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
# A version of Python: from the path (where pyenv may have a shim for none), or from pyenv.
python_of = $(firstword $(shell python$(1) -c 'import sys; print(sys.executable)' 2>/dev/null) \
  $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python$(1)))
COLAB_PYTHON = $(call python_of,3.13)
KAGGLE_PYTHON = $(call python_of,3.12)
QUICKSTART := notebooks/01_quickstart.ipynb

# What Colab and Kaggle have of what SpeedKit asks for.
HOSTED := torch ipython ipykernel ipywidgets ipyparallel torchao transformers numpy scipy matplotlib \
  pydantic pyyaml platformdirs psutil cloudpickle scikit-learn setuptools

# What depends on the machine is tested as on others too, besides `quick`, which pins a plain CPU.
DEPENDING := notebook state step right rounds search panel
ON_MACHINES := $(addprefix tests/,rounds/test_inside.py catalog/test_precision.py catalog/test_grad_scaler.py \
  rounds/test_benchmark.py notebook/test_speedbench.py notebook/test_speedkit.py \
  search/test_search.py search/test_learning.py panel/test_panel.py)
# What depends on the processor, too: also as on older ones, on one core, on a busy one, and abroad.
ON_PROCESSORS := $(addprefix tests/,machines right catalog/test_gemm.py catalog/test_precision.py \
  catalog/test_compile.py extras/rollouts extras/profile)
# The oldest torch that the package declares, Colab's, and the newest that there is.
TORCHS := 2.9.0 2.11.0 newest

# What needs optional packages, which are outside of the libraries of .venv: transformers imports torchao
# where it is. The name of their folder says that they are libraries.
OPTIONAL := tests/catalog/test_catalog.py tests/extras/by_request \
  $(addprefix tests/frameworks/,test_adapters_and_pipelines.py test_marimo.py)
MODELS := $(addprefix notebooks/,17_lora.ipynb 18_diffusion.ipynb)

.PHONY: demo test most quick machines planned processors pythons device profiles slow optional thorough lint notebooks browser chromium colab kaggle docs versions release workflows dist notes gpu benchmarks clean

demo: .venv/installed
	@echo "Running $(QUICKSTART): about half a minute."
	@$(BIN)/python notebooks/run.py $(QUICKSTART)
	@echo "Open it yourself:  $(BIN)/jupyter lab $(QUICKSTART)"

# Three parts at a time, the longest first: where one waits another computes. Old versions of make mix
# their lines.
test:
	@$(MAKE) -j 3 $(if $(filter output-sync,$(.FEATURES)),--output-sync=line) \
	  most device lint planned notebooks optional

# Quick, slow and browser at once: tests are collected once, and where one waits another computes.
most: .venv/installed
	@$(MAKE) --no-print-directory chromium
	$(BIN)/pytest -m "not thorough"

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

QUICK := not (browser or slow or thorough or long)
quick: .venv/installed
	$(BIN)/pytest -m "$(QUICK)"

# The same tests as for other machines, and for this very one: with `machines` what is marked
# `every_machine` on each and every other test on one of them, with `profiles` all on each.
NEITHER := -m "not (browser or slow or thorough or kernel or compile or real_time)"
machines: planned processors pythons

planned: .venv/installed
	$(BIN)/pytest -q --profile bf16,fp16,one_core,here $(NEITHER) $(ON_MACHINES)

# `make processors ON_PROCESSORS=` runs all of the quick part in each of the surroundings.
processors: .venv/installed
	$(BIN)/python tests/processors.py $(ON_PROCESSORS)

# The quick part on other Pythons. Each takes a .venv of its own.
pythons: $(addprefix python-,3.10 3.12 3.13)
python-%:
	@test -n "$(call python_of,$*)" || { echo "Skipped: Python $* is not here."; exit 0; }; \
	$(MAKE) --no-print-directory .venv-python-$*/installed && echo "Python $*:" && \
	.venv-python-$*/bin/python -m pytest -q -m "$(QUICK)"

profiles: .venv/installed
	for profile in bf16 fp16 one_core here; do \
	  $(BIN)/pytest -q --profile $$profile $(NEITHER) $(addprefix tests/,$(DEPENDING)) || exit 1; done

slow: .venv/installed
	$(BIN)/pytest -m "slow and not thorough"

optional: .venv/optional/installed
	PYTHONPATH=.venv/optional/site-packages $(BIN)/pytest -q -m "not thorough" $(OPTIONAL)
	PYTHONPATH="$(CURDIR)/.venv/optional/site-packages" OMP_NUM_THREADS=1 $(NBVAL) $(MODELS)

# The rest of the long lists, some minutes: before a release, and after work on what they test.
thorough: .venv/installed
	$(BIN)/pytest -m thorough
	$(BIN)/pytest -m "hypothesis and not browser" --hypothesis-profile thorough

# Two at a time, each with one thread: with two each they would wait for one another. The last
# notebook is the longest: beside all others, not after them.
NBVAL := $(BIN)/pytest --dist loadfile -p no:cacheprovider -p nbval --nbval-lax \
  --nbval-current-env --nbval-sanitize-with=configs/nbval.cfg --nbval-cell-timeout=900 --no-loadscope-reorder
notebooks: .venv/installed
	OMP_NUM_THREADS=1 $(NBVAL) $(filter-out $(MODELS),$(shell ls -r notebooks/*.ipynb)) \
	  notebooks/test_stored_outputs.py

# The panel in JupyterLab and a headless Chromium, which root gets from Debian where there is none.
browser: .venv/installed chromium
	$(BIN)/pytest -m "browser and not thorough" tests/browser

chromium:
	@command -v chromium chromium-browser google-chrome >/dev/null || test "$$(id -u)" != 0 \
	  || ! command -v apt-get >/dev/null \
	  || { apt-get update -qq; apt-get install -y -qq --no-install-recommends \
	       chromium fonts-dejavu-core; } \
	  || echo "Chromium could not be installed: the browser tests are skipped."

# A part of magics and panel under the versions that Colab and Kaggle have, and what installing adds.
colab: there = $(COLAB_PYTHON)
kaggle: there = $(KAGGLE_PYTHON)
colab kaggle:
	$(if $(there),$(MAKE) on-$@ there=$(there),@echo "Skipped: $@ has another Python, which is not here (make $@ there=/path/to/python).")

on-%: .venv-%/installed
	.venv-$*/bin/pytest -m "smoke and not compile" tests/notebook tests/panel tests/test_installing.py

# The site, strictly, into build/site; then the code on its pages runs. Sphinx has an environment of
# its own, which also sees the packages of .venv.
docs: .venv-docs/installed
	.venv-docs/bin/python -m sphinx -c docs -b html -E -q -n -W --keep-going . build/site
	.venv-docs/bin/python -m pytest -n 0 -q -m "" tests/notebook/test_docs.py
	@echo "Open build/site/index.html"

# The quick part with other versions of torch. Each takes a .venv of its own of some gigabytes.
versions: $(TORCHS:%=.venv-torch-%/installed)
	for torch in $(TORCHS); do \
	  echo "torch $$torch:"; .venv-torch-$$torch/bin/python -m pytest -q || exit 1; done

# sdist and wheel in dist/, each installed as a stranger would, the notes of the release at the end.
# The oldest Python and Colab's; the torch that the tests have, or another: `make release TORCH=torch`.
RELEASE := .venv-release/bin
TORCH ?= $(shell grep '^torch==' configs/constraints.txt)
release: lint workflows dist $(addprefix stranger-,3.10 3.13) notes

# What GitHub reads, by its schemas and by the rules of zizmor on what a workflow may do.
workflows: .venv-release/installed
	$(RELEASE)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(RELEASE)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(RELEASE)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(RELEASE)/zizmor --offline --persona pedantic .github

dist: .venv-release/installed
	rm -rf dist
	$(RELEASE)/python -m build
	$(RELEASE)/twine check --strict dist/*

# The wheel in an empty environment, and the quickstart in a folder that has nothing else.
stranger-%:
	@test -n "$(call python_of,$*)" || { echo "Skipped: Python $* is not here."; exit 0; }; \
	set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; wheel=$$(echo "$(CURDIR)"/dist/*.whl); \
	echo "Python $*: installing $$(basename "$$wheel") into an empty environment: some minutes."; \
	cp $(QUICKSTART) notebooks/run.py "$$folder"; cd "$$folder"; $(call python_of,$*) -m venv venv; \
	venv/bin/pip install --quiet --disable-pip-version-check "$$wheel[notebooks]" $(TORCH); \
	venv/bin/python run.py $(notdir $(QUICKSTART))

# The part of CHANGELOG.md on this version.
notes:
	@awk -v "version=## $$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" \
	  '/^## / { ours = index($$0, version) == 1 } ours' CHANGELOG.md

# On a device that computes late (tests/device/sim.cpp), in a process of its own: torch has it for good.
ON_DEVICE := tests/device tests/extras/kernels/test_graphs.py tests/extras/rollouts/test_rollout.py
device: .venv/installed
	@if command -v c++ >/dev/null && command -v ninja >/dev/null; then \
	  PYTHONPATH=tests/device $(BIN)/pytest -n 0 -q -p sim $(ON_DEVICE); \
	else echo "Skipped: the device is compiled with c++ and ninja, which are not here."; fi

gpu: .venv/installed
	$(BIN)/pytest -n 0 -m gpu --profile here

# Without truth.py, oracle.py, catalog.py, scale.py and models.py, which take half an hour to two and can be stopped and
# resumed.
benchmarks: .venv/installed
	for program in $(filter-out %/truth.py %/oracle.py %/catalog.py %/scale.py %/models.py,$(wildcard tests/benchmarks/[a-z]*.py)); do \
	  $(BIN)/python $$program || exit 1; done

.venv/installed: pyproject.toml configs/constraints.txt
	@echo "Installing into .venv: some minutes, once."
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check \
	  --constraint configs/constraints.txt --editable '.[test]'
	@touch $@

.venv/optional/installed: .venv/installed
	@$(BIN)/pip install --quiet --disable-pip-version-check --target .venv/optional/site-packages --upgrade \
	  --no-deps --constraint configs/constraints.txt torchao peft diffusers importlib_metadata zipp \
	  marimo-base markdown msgspec pymdown-extensions
	@touch $@

.venv-colab/installed .venv-kaggle/installed: .venv-%/installed: pyproject.toml configs/constraints-%.txt
	@echo "Installing into .venv-$*: some minutes, once."
	@$(there) -m venv --clear .venv-$*
	@.venv-$*/bin/pip install --quiet --disable-pip-version-check \
	  --constraint configs/constraints-$*.txt $(HOSTED)
	@.venv-$*/bin/pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --dry-run --report .venv-$*/report.json '.[autotune,processes,quantization]'
	@.venv-$*/bin/pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --constraint configs/constraints-$*.txt --editable '.[autotune,processes,quantization]' \
	  nbclient pytest pytest-xdist hypothesis expecttest
	@touch $@

.venv-release/installed: Makefile
	@$(PYTHON) -m venv --clear .venv-release
	@$(RELEASE)/pip install --quiet --disable-pip-version-check build twine check-jsonschema zizmor
	@touch $@

.venv-docs/installed: .venv/installed
	@echo "Installing into .venv-docs: a minute, once."
	@$(BIN)/python -m venv --clear .venv-docs
	@cd .venv-docs/lib/python3*/site-packages && \
	  echo "import site; site.addsitedir('$$(ls -d "$(CURDIR)"/.venv/lib/python3*/site-packages)')" > venv.pth
	@.venv-docs/bin/pip install --quiet --disable-pip-version-check \
	  --constraint configs/constraints.txt --editable '.[docs]'
	@touch $@

.venv-python-%/installed: pyproject.toml configs/constraints.txt
	@echo "Installing into .venv-python-$*: some minutes, once."
	@$(call python_of,$*) -m venv .venv-python-$*
	@.venv-python-$*/bin/pip install --quiet --disable-pip-version-check \
	  $(if $(filter 3.10,$*),,--constraint configs/constraints.txt) --editable '.[test]' $(TORCH)
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
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
