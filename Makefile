# make demo    set everything up in .venv and run the main job
# make test    set up what is missing, then lint and run the CPU tests
#
# PYTHON=...   the interpreter that .venv is made from
# PY=...       an interpreter that already has every dependency: no .venv is made and nothing is downloaded
# EPBUF_CUDA=  AUTO (default: when nvcc is found), ON or OFF
# ARGS=...     passed on to the demo, the benchmark or pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv build demo test test-gpu bench bench-gpu bench-nvlink sanitize lint format clean

PYTHON ?= python3
TORCH := torch==2.13.0
BUILD_TOOLS := scikit-build-core pybind11 cmake ninja
MEGATRON := megatron-core==0.19.2

# Stamps live beside what they vouch for: a deleted .venv takes its stamps along.
ifdef PY
STAMPS := build/stamps
else
PY := .venv/bin/python
CLANG_FORMAT := .venv/bin/clang-format
STAMPS := .venv/stamps
OWN_VENV := 1
endif
CLANG_FORMAT ?= clang-format

PIP := $(PY) -m pip --disable-pip-version-check
CXX_FILES := $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
NATIVE_SOURCES := csrc/CMakeLists.txt $(filter csrc/%,$(CXX_FILES))
HOST_SOURCES := $(wildcard csrc/*.h csrc/arena_map.cpp csrc/host/* tests/native/*)

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

venv: $(STAMPS)/venv
build: $(STAMPS)/build

ifdef OWN_VENV
$(STAMPS)/venv: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	@echo "installing $(TORCH) and the build tools into .venv"
	$(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet $(BUILD_TOOLS)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build: $(STAMPS)/venv $(NATIVE_SOURCES)
	@echo "building the native module"
	$(PIP) install --quiet --no-build-isolation --editable '.[dev]'
	@touch $@

# From source and without its dependencies: its wheels are for Python 3.12, and torch is here already.
$(STAMPS)/megatron: $(STAMPS)/build
	@echo "installing $(MEGATRON), which the tests of its adapter need"
	$(PIP) install --quiet numpy packaging triton==3.7.1
	$(PIP) install --quiet --no-deps --ignore-requires-python --no-binary megatron-core $(MEGATRON)
	@touch $@
else
$(STAMPS)/venv:
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build: $(STAMPS)/venv pyproject.toml $(NATIVE_SOURCES)
	$(PIP) install --quiet --no-build-isolation --no-deps --no-index --editable .
	@touch $@

$(STAMPS)/megatron: $(STAMPS)/build
	@touch $@
endif

demo: build
	$(PY) graphs/train_loop.py $(ARGS)

bench: build
	$(PY) graphs/bench/cpu.py $(ARGS)

bench-gpu: build
	$(PY) graphs/bench/launch.py $(ARGS)

bench-nvlink: build
	$(PY) graphs/bench/nvlink.py $(ARGS)

test: lint $(STAMPS)/megatron
	$(PY) -m pytest -m "not gpu" $(ARGS)

test-gpu: build
	$(PY) -m pytest -m gpu tests/gpu $(ARGS)

lint: build
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES)

format: build
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CXX_FILES)

# The host protocol with virtual ranks on threads, under ThreadSanitizer, then AddressSanitizer with UBSan.
sanitize: build/sanitize/thread build/sanitize/address,undefined
	build/sanitize/thread
	build/sanitize/address,undefined

build/sanitize/%: $(HOST_SOURCES)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -g -Wall -Wextra -fsanitize=$* -fno-sanitize-recover=all -Icsrc \
	  tests/native/*.cpp csrc/arena_map.cpp csrc/host/*.cpp -o $@ -pthread -lrt

clean:
	rm -rf build dist .venv/stamps .mypy_cache .ruff_cache .pytest_cache .hypothesis
