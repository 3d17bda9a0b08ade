# Two commands on a fresh machine: `make demo` and `make test`. Both set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test quick test-portable check same wheel-check flower-check docs benchmarks clean

demo: $(STAMP)
	$(BIN)/stobatch demo --out runs/demo

# Runs are written in memory where there is enough of it: waiting for a disk shows nothing.
test test-portable quick: export TMPDIR := $(shell \
	df -Pk /dev/shm 2>/dev/null | awk 'END { print ($$4 > 8000000) ? "/dev/shm" : "" }' | grep . || echo "$${TMPDIR:-/tmp}")
# Compiled files are kept, whatever the shell says: tests start hundreds of processes that import the same sources.
unexport PYTHONDONTWRITEBYTECODE
# Two more than CI's two cores: tests of kills and of several processes mostly wait. Those of numbers do not.
WORKERS := 4
test-portable: WORKERS := 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST)

# Within minutes: what each room promises, the theorems, and the examples in the code.
quick: $(STAMP)
	$(PYTEST) -m "not slow" tests/unit tests/theorems src

# The tests that compare numbers, as on a CPU without AVX: no result may hang on the width of a vector unit. Of the
# accountant's, which come from SciPy's scalar functions, the golden ones are enough.
PORTABLE := theorems system/golden unit/models unit/attacks/test_attacks.py unit/attacks/test_geometry.py \
	unit/dp/test_bounded_contributions.py unit/dp/test_clipping_norms.py unit/dp/test_mixed_precision.py unit/dp/test_per_example.py \
	unit/dp/test_rounded_gaussian.py \
	unit/bounds/test_arithmetic.py unit/bounds/test_boxes.py unit/bounds/test_linear_bounds.py \
	unit/baselines/test_noise_layer.py unit/training/test_pieces.py unit/training/test_exact_sum.py \
	system/processes/test_logs_of_a_group.py
test-portable: $(STAMP)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Nehalem \
	NPY_DISABLE_CPU_FEATURES="X86_V3 X86_V4 AVX512_ICL AVX512_SPR" \
	$(PYTEST) -m "not slow" $(addprefix tests/,$(PORTABLE))

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A change of structure changed nothing: the same command lines here and in BASE leave the same bits (see the script).
BASE := c960f4c
same: $(STAMP)
	$(BIN)/python benchmarks/same.py --base $(BASE)

# The package installs from a wheel, with its data, into an environment that has only its dependencies.
wheel-check: $(STAMP)
	rm -rf build/wheel build/site
	$(BIN)/pip wheel --quiet --no-deps -c constraints.txt -w build/wheel .
	$(BIN)/pip install --quiet --no-deps --target build/site build/wheel/stobatch-*.whl
	cd build && PYTHONPATH=site ../$(BIN)/python -P -c "import stobatch, stobatch_recipes, sys; \
	assert stobatch.__file__.startswith(__import__('os').getcwd()), stobatch.__file__; \
	from stobatch.data import load; from stobatch.config import DataConfig; print(load(DataConfig()).info)"

# Flower wants older versions of some packages (constraints-flower.txt): an environment of its own, laid over the other.
FLOWER := build/flower
flower-check: $(FLOWER)/.installed
	FLWR_HOME=$(FLOWER)/home $(FLOWER)/bin/python -m pytest tests/system/flower/test_federated_flower.py

$(FLOWER)/.installed: $(STAMP) constraints-flower.txt
	rm -rf $(FLOWER)
	$(BIN)/python -m venv $(FLOWER)
	for python in $(BIN) $(FLOWER)/bin; do $$python/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"; \
	done | { read base; read own; printf '%s\n%s\n' "$$base" "$$PWD/src" > $$own/base.pth; }
	$(FLOWER)/bin/pip install --quiet --no-compile -c constraints-flower.txt flwr
	touch $@

# The documentation as a site, in build/docs/index.html. An environment of its own: nothing else needs MkDocs.
SITE := build/site-tools
docs: $(SITE)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

$(SITE)/.installed: constraints.txt mkdocs.yml
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet -c constraints.txt mkdocs-material
	touch $@

# Every benchmark, its record in benchmarks/results, and the pages made from them: SMALL=--small takes minutes.
SMALL :=
benchmarks: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[benchmarks]"
	$(BIN)/pip install --quiet --no-deps -c constraints.txt torchattacks opacus opt_einsum
	$(BIN)/python benchmarks/measure.py $(SMALL)

# Compiled on all cores, which pip does not do; a package may ship files that no version of Python can read.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src || true
	touch $@

clean:
	rm -rf $(VENV) build dist
