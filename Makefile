# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: train test lint bench docs clean

train: .venv/ready
	$(BIN)/python launch/train.py --preset laptop --out runs/phantom --again

test: .venv/ready
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not started"

lint: .venv/ready
	$(BIN)/ruff check . && $(BIN)/mypy

bench: .venv/ready
	$(BIN)/python launch/bench.py

# the manual as a site, in build/site
docs: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m mkdocs build --quiet

# torch first and pinned: the others accept what is there, and so pull no second build.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
