# Every target makes the environment it needs first (visible steps, seconds the second time).
#   PYTHON=...       the interpreter to build on (>= 3.11)
#   TORCH=...        another torch: a requirement such as "torch==2.12.*", or "system" for the one the interpreter has
#   ALLOW_CUDA=1     take the CUDA build of torch on a machine without an NVIDIA device
#   ARGS=...         added to the target's command; for `make test`, pytest's: paths, -k, -x, ...
#   LANES=...        test processes side by side in `make test` (2)
SHELL = /bin/sh
PYTHON ?= python3
TORCH ?=
ALLOW_CUDA ?=
ARGS ?=
LANES ?= 2
PY = .venv/bin/python
PACKAGES = -p kvalet.runtime -p kvalet.sched -p kvalet.store -p kvalet.api -p kvalet.loadtest
export PYTHON TORCH ALLOW_CUDA LANES
export PYTHONSAFEPATH = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help setup setup-notorch model demo test test-long serve check bench-cpu bench-store soak-store gpu-test gpu-bench clean
.NOTPARALLEL:

help:
	@echo 'make demo       twelve agents on one small machine: spilled, killed, restored, compared (about 4 minutes)'
	@echo 'make test       all tests; make test-long: those that need minutes each'
	@echo 'make serve      the server with the default model, ARGS="--store DIR --port 8000 ..."'
	@echo 'make check      lint, format, types, house rules'
	@echo 'make bench-cpu  kvalet beside llama.cpp (xllamacpp), table and bench-cpu.json'
	@echo 'make gpu-test, make gpu-bench: the GPU engine, on a machine with a CUDA device'
	@echo 'make bench-store  the disk store beside the raw disk; make soak-store: ten minutes of faults'
	@echo 'make model      fetches the default model; make clean: removes the environments'

setup:
	@.ci/stage "set-up" .ci/setup main

setup-notorch:
	@.ci/stage "set-up without torch" .ci/setup notorch

model: setup

demo: setup
	@.ci/stage "demo" $(PY) -m kvalet demo $(ARGS)

test: setup setup-notorch
	@$(PY) .ci/run_tests.py $(ARGS)

test-long: setup
	@.ci/stage "long tests" $(PY) -m pytest -q -m long --durations=15 $(ARGS)

serve: setup
	@exec $(PY) -m kvalet serve $(ARGS)

check: setup
	@.ci/stage "lint" $(PY) -m ruff check .
	@.ci/stage "format" $(PY) -m ruff format --check .
	@.ci/stage "types" env MYPYPATH=.venv/mypy $(PY) -m mypy $(PACKAGES)
	@.ci/stage "house rules" $(PY) -m pytest -q tests/test_tidy.py

bench-cpu: setup
	@.ci/stage "set-up of the peer" .ci/setup bench
	@.ci/stage "benchmark" $(PY) tests/bench/bench_cpu.py $(ARGS)

# DIR=...: a directory on the disk to measure; about a minute.
bench-store: setup
	@.ci/stage "benchmark of the store" $(PY) -m kvalet store bench --dir $(or $(DIR),.) $(ARGS)

# MINUTES=10: sessions spilled, restored, evicted and killed on one directory whose disk fails in 5 % of all calls.
soak-store: setup
	@.ci/stage "soak of the store" $(PY) tests/support/storesoak.py --minutes $(or $(MINUTES),10) $(ARGS)

# On a machine with a CUDA device and flashinfer (extra [cuda]); elsewhere both fail.
gpu-test: setup
	@.ci/stage "GPU tests" $(PY) -m pytest -q -m gpu tests/gpu $(ARGS)

gpu-bench: export PYTHONPATH = tests/bench/gpu
gpu-bench: setup
	@.ci/stage "GPU decode and prefill" $(PY) tests/bench/gpu/decode.py
	@.ci/stage "GPU decode through the scheduler" $(PY) tests/bench/gpu/rotation.py --tier decode --out gpu-through.json
	@.ci/stage "GPU agent rotation" $(PY) tests/bench/gpu/rotation.py --tier ram --out gpu-rotation-ram.json
	@.ci/stage "GPU agent rotation, all in the pool" $(PY) tests/bench/gpu/rotation.py --tier all --out gpu-rotation-all.json
	@.ci/stage "GPU agent rotation over HTTP" $(PY) tests/bench/gpu/rotation.py --tier ram --http --out gpu-rotation-http.json
	@.ci/stage "GPU bars" $(PY) tests/bench/gpu/bars.py gpu-decode.json gpu-through.json gpu-rotation-*.json

clean:
	rm -rf .venv .venv-notorch .venv-bench build dist kvalet.egg-info .mypy_cache .ruff_cache .pytest_cache
	rm -f demo-report.json bench-cpu.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
