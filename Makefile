# Verbs for people and for CI. `make demo` and `make test` work from a fresh clone.

PYTHON ?= python3
VENV ?= .venv
# a CPU build, installed before anything that would pull a CUDA build of several gigabytes
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.0
OLD_TRANSFORMERS ?= transformers==5.17.0
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 60
# inputs, instead of seconds
FUZZ_RUNS ?=
# --bench, or some files of tests/gpu
GPU_ARGS ?=

BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc src -name '*.cpp' -o -name '*.h' -o -name '*.py')
CPP := $(wildcard csrc/*.cpp csrc/*.h benchmarks/*.cpp tests/core/*.cpp tests/core/*.h src/rowstream/device/*.cu)
PYTHON_CODE := src tests benchmarks examples

.PHONY: help demo test ci lint types unit coverage asan tsan fuzz platforms old-transformers demo-in-clone format wheel bench ptx gpu clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    write a checkpoint, serve it with its table on disk, ask it a question'
	@echo 'make test    lint, types and all tests'
	@echo 'make ci      all of that, the core under sanitizers, older transformers, the demo in a clone'
	@echo 'make coverage  the tests alone, with the lines that none of them reaches'
	@echo 'make fuzz    headers, indexes and configs for FUZZ_SECONDS, or FUZZ_RUNS inputs'
	@echo 'make tsan    the core under ThreadSanitizer'
	@echo 'make wheel   wheels for the Pythons found, in dist/'
	@echo 'make bench   the reader beside fio and bare io_uring; writes a CSV'
	@echo 'make ptx     the kernels of the device path, compiled and assembled; needs no GPU'
	@echo 'make gpu     the tests of the device path, on a machine with a GPU; writes a report'
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

# the oldest CUDA 12: drivers take PTX of their own toolkit and of those before
CUDA_TOOLS := nvidia-cuda-nvrtc-cu12==12.0.76 nvidia-cuda-nvcc-cu12==12.0.76
ptx: $(VENV)/.dev
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/cuda $(CUDA_TOOLS)
	PYTHONPATH=build/cuda $(BIN)/python tools/ptx.py

# of the environment that has torch for this GPU: VENV has one for CPUs
gpu:
	$(PYTHON) tools/gpu_report.py $(GPU_ARGS)

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

# the gate is on branches; COVERAGE= does without, for a part of the tests
COVERAGE ?= --cov --cov-fail-under=95 --cov-report=term:skip-covered
unit: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n auto --durations=10 $(COVERAGE) $(PYTEST_ARGS)

coverage: COVERAGE += --cov-report=term-missing:skip-covered
coverage: unit

# pytest's capture swallows a sanitizer's report: it goes to a file, and any file is a failure
CORE_TESTS := $(addprefix tests/test_,gather.py read_faults.py read_timeouts.py changed_files.py native_hash.py store.py cache.py prefetch.py mapped_faults.py mapped_pages.py)
asan: $(VENV)/.dev
	rm -rf build/asan && mkdir -p build/asan
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --target build/asan/site \
	    -Cbuild-dir=build/asan/tree -Ccmake.build-type=RelWithDebInfo \
	    -Ccmake.define.ROWSTREAM_SANITIZE=address,undefined -Ccmake.define.ROWSTREAM_WERROR=ON .
	PYTHONPATH=build/asan/site LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	    ASAN_OPTIONS=detect_leaks=0:log_path=$(CURDIR)/build/asan/report \
	    UBSAN_OPTIONS=print_stacktrace=1:log_path=$(CURDIR)/build/asan/report \
	    $(BIN)/python -m pytest -q -n auto $(CORE_TESTS)
	! cat build/asan/report.* 2>/dev/null

# the core without an interpreter, whose own races would drown what is looked for
tsan: $(VENV)/.dev
	$(BIN)/pip install --quiet cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/tsan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	    -DROWSTREAM_SANITIZE=thread -DROWSTREAM_STRESS=ON -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python"
	$(BIN)/ninja -C build/tsan stress doors
	TSAN_OPTIONS=halt_on_error=1 build/tsan/stress build/tsan/table.bin
	TSAN_OPTIONS=halt_on_error=1 build/tsan/doors

# not of the dev extra: atheris has wheels for some Pythons only
fuzz: $(VENV)/.dev
	$(BIN)/pip install --quiet atheris
	$(BIN)/python tests/fuzz/fuzz_checkpoint.py $(if $(FUZZ_RUNS),-runs=$(FUZZ_RUNS),--seconds $(FUZZ_SECONDS))

# as root, or most of it is skipped
platforms: $(VENV)/.dev
	$(BIN)/python tools/platform_table.py

MODEL_TESTS := $(addprefix tests/test_,transformers.py transformers_loading.py generate.py engine_queue.py logprobs.py read_ahead.py)
old-transformers: $(VENV)/.dev
	rm -rf build/old-transformers
	$(BIN)/pip install --quiet --no-deps --target build/old-transformers '$(OLD_TRANSFORMERS)' 'huggingface-hub<2'
	PYTHONPATH=build/old-transformers $(BIN)/python -m pytest -q -n auto $(MODEL_TESTS)

demo-in-clone:
	rm -rf build/clone && git clone --quiet . build/clone
	$(MAKE) -C build/clone demo VENV=.venv
	rm -rf build/clone

ci: test asan tsan old-transformers fuzz demo-in-clone

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(PYTHON_CODE) tools
	$(BIN)/ruff format $(PYTHON_CODE) tools
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf build dist $(VENV)
