# Verbs for people and for CI. `make demo` and `make test` work from a fresh clone.

PYTHON ?= python3
VENV ?= .venv
# a CPU build, installed before anything that would pull a CUDA build of several gigabytes
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.0
OLD_TRANSFORMERS ?= transformers==5.17.0
PYTEST_ARGS ?=

BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc src -name '*.cpp' -o -name '*.h' -o -name '*.py')
CPP := $(wildcard csrc/*.cpp csrc/*.h benchmarks/*.cpp)
PYTHON_CODE := src tests benchmarks examples

.PHONY: help demo test ci lint types unit asan old-transformers demo-in-clone format wheel bench clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    write a checkpoint, serve it with its table on disk, ask it a question'
	@echo 'make test    lint, types and all tests'
	@echo 'make ci      all of that, the core under sanitizers, older transformers, the demo in a clone'
	@echo 'make wheel   wheels for the Pythons found, in dist/'
	@echo 'make bench   the reader beside fio and bare io_uring; writes a CSV'
	@echo 'make format  ruff and clang-format in place'

# --- environments -----------------------------------------------------------------------------

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet '$(TRANSFORMERS)'
	touch $@

$(VENV)/.serve: $(VENV)/.torch $(SOURCES)
	$(BIN)/pip install --quiet '.[serve]' openai
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/pip install --quiet '.[serve,dev]'
	touch $@

# --- what a user runs -------------------------------------------------------------------------

demo: $(VENV)/.serve
	$(BIN)/python examples/demo.py

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/reader.py

wheel:
	$(PYTHON) tools/wheels.py

# --- checks -----------------------------------------------------------------------------------

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check $(PYTHON_CODE) tools
	$(BIN)/ruff format --check $(PYTHON_CODE) tools
	$(BIN)/clang-format --dry-run --Werror $(CPP)

# the stub is a product of the build; mypy looks for it beside the sources
types: $(VENV)/.dev
	cp "$$($(BIN)/python -c 'import pathlib, rowstream; print(pathlib.Path(rowstream.__file__).parent)')"/_core.pyi src/rowstream/
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(BIN)/python -m pytest -q --durations=10 $(PYTEST_ARGS)

# pytest's capture swallows a sanitizer's report: it goes to a file, and any file is a failure
CORE_TESTS := tests/test_gather.py tests/test_read_faults.py tests/test_native_hash.py tests/test_store.py
asan: $(VENV)/.dev
	rm -rf build/asan && mkdir -p build/asan
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --target build/asan/site \
	    -Cbuild-dir=build/asan/tree -Ccmake.build-type=RelWithDebInfo \
	    -Ccmake.define.ROWSTREAM_SANITIZE=address,undefined -Ccmake.define.ROWSTREAM_WERROR=ON .
	PYTHONPATH=build/asan/site LD_PRELOAD="$$(g++ -print-file-name=libasan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:log_path=$(CURDIR)/build/asan/report \
	    UBSAN_OPTIONS=print_stacktrace=1:log_path=$(CURDIR)/build/asan/report \
	    $(BIN)/python -m pytest -q $(CORE_TESTS)
	! cat build/asan/report.* 2>/dev/null

old-transformers: $(VENV)/.dev
	rm -rf build/old-transformers
	$(BIN)/pip install --quiet --no-deps --target build/old-transformers '$(OLD_TRANSFORMERS)'
	PYTHONPATH=build/old-transformers $(BIN)/python -m pytest -q tests/test_transformers.py tests/test_generate.py

demo-in-clone:
	rm -rf build/clone && git clone --quiet . build/clone
	$(MAKE) -C build/clone demo VENV=.venv
	rm -rf build/clone

ci: test asan old-transformers demo-in-clone

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(PYTHON_CODE) tools
	$(BIN)/ruff format $(PYTHON_CODE) tools
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf build dist $(VENV)
