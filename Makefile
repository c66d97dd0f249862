# Two commands set everything up: `make demo` shows kerngen at work, `make test` checks it. Both need python3.11+ and make.
# `make docs` makes the site.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  := examples/tiny/gemma-4-tiny-w4a16
BUDGET ?= 6m

.PHONY: demo test test-slow test-clients test-vllm test-gpu golden lint docs clean

demo: $(VENV)/.installed
	$(BIN)/kerngen doctor
	$(BIN)/kerngen tune --arch sm70 --model gemma-4-31b --trials 6 --time-budget $(BUDGET)
	$(BIN)/kerngen db ls --device H200
	$(BIN)/kerngen run $(MODEL) --draft examples/tiny/gemma-4-tiny-assistant --num-draft-tokens 5 --temperature 0 \
	  --prompt "$$(cat examples/tiny/prompt.txt)"
	$(BIN)/kerngen run examples/tiny/gemma-4-tiny-unified --image examples/tiny/cross.png --prompt "What is this?"

# One thread a worker: torch's threads of two workers would wait for each other on two cores. Hundreds of tests start a
# process: none of them compiles kerngen's modules again, also where the environment asks Python to keep no bytecode.
# Three workers for two cores: some tests wait. Files begin in the order of tests/host/conftest.py, the longest first.
TESTS = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest tests/host -n 3 --dist loadfile \
	  --no-loadscope-reorder --durations=20 --durations-min=5
AGAIN = OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/host --last-failed --last-failed-no-failures none -x
# Many tests have limits of time, which a busy machine does not keep: what failed runs once more, alone, and the first
# that fails again ends it.
test: $(VENV)/.installed-dev lint
	$(TESTS) -m "not slow" || $(AGAIN)

# What takes long and what few changes break (SLOW in tests/host/conftest.py): before a release, and after a change there.
test-slow: $(VENV)/.installed-dev
	$(TESTS) -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Clients of the two APIs in environments of their own, whose pins contradict each other's and constraints.txt.
test-clients: $(VENV)/.installed-dev
	$(BIN)/python examples/serving/clients/run.py openai anthropic langchain litellm

# kerngen.vllm beside the Python of each release of vLLM that it supports, which is downloaded into build/vllm.
test-vllm: $(VENV)/.installed-dev
	$(BIN)/python tests/in_vllm/run.py $(RELEASES)

# Rewrites what tests compare with: default configurations, and machine code (tests/host/machine_code.py).
golden: $(VENV)/.installed-dev
	$(BIN)/python tests/host/golden.py
	$(BIN)/python tests/host/machine_code.py

# The site, in build/docs/html: nothing that it shows is fetched from elsewhere. It fails where a link leads nowhere.
docs: $(VENV)/.installed-docs
	$(BIN)/python docs/site/build.py build/docs

# Runs with the Python that is there: torch with CUDA, CuPy, cuda-bindings and pytest must be importable (README), and
# pytest-xdist for GPU_WORKERS processes that share the GPU. What times is run after that, alone. SMOKE=1: a sample.
GPU_WORKERS ?= $(shell $(PYTHON) -c 'import os; print(max(1, len(os.sched_getaffinity(0)) - 1))')
test-gpu:
	@export PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" OMP_NUM_THREADS=1; failed=0; \
	run="$(PYTHON) -m pytest tests/gpu $(if $(SMOKE),--smoke)"; workers="-n $(GPU_WORKERS) --dist loadscope"; \
	$(PYTHON) -c 'import xdist' 2> /dev/null || { workers=; \
	  echo "no pytest-xdist: tests run one after the other; pip install pytest-xdist for $(GPU_WORKERS) at a time"; }; \
	set -x; $$run -m 'gpu and not whole_gpu' --durations=20 $$workers || failed=1; $$run -m 'gpu and whole_gpu' || failed=1; exit $$failed

# -q hides pages of lines, and not what fails: one line says beforehand what takes minutes.
SAY     = @echo "installing kerngen and what it needs into $(VENV): some minutes, in which pip says nothing"
INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kerngen needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(SAY)
	$(INSTALL) -e '.[cuda12,serve,media]'
	@touch $@

# What is imported is compiled then, and kept: of torch a part.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(SAY)
	$(INSTALL) --no-compile -e '.[cuda12,serve,dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(SAY)
	$(INSTALL) -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
