# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
BIN = .venv/bin
# A CUDA build for Linux, with which the pretended GPU was tried; it needs no GPU and no driver.
CUDA_TORCH ?= torch==2.14.1

# Compiled modules are kept, also where the environment says otherwise: each start would compile 300 files again, and each of
# pytest's workers all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-gpu lint bench docs clean

train: .venv/ready
	$(BIN)/python launch/train.py --preset laptop --out runs/phantom --again

# huge pages: a forked rank copies the page tables of its test worker
test: .venv/ready
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m pytest -n 4 --dist loadfile -m "not started and not long"

# Needs 5.5 GB and g++: programs on a pretended GPU, see tests/pretended_gpu/README.md.
test-gpu: .venv-gpu/ready
	.ci/gpu

lint: .venv/ready
	$(BIN)/ruff check . && $(BIN)/mypy

bench: .venv/ready
	$(BIN)/python launch/bench.py

# the manual as a site, in build/site
docs: .venv/ready
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m mkdocs build --quiet

# torch first and pinned: the others accept what is there, and so pull no second build. Not compiled: most modules are never imported.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

.venv-gpu/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-gpu
	grep -v '^torch==' constraints.txt > .venv-gpu/constraints.txt
	.venv-gpu/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c .venv-gpu/constraints.txt $(CUDA_TORCH)
	.venv-gpu/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c .venv-gpu/constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf .venv .venv-gpu build dist *.egg-info
