# make test: everything CI runs.  make demo: see it work.  make zoo: every model of the zoo.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test demo zoo lint clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@# meanwhile, a browser for the tests of the page, where one can be installed; else they are skipped
	$(PYTHON) tests/browser.py & $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	found=$$?; wait; exit $$found
	@# torchvision pins a torch of its own; only its and timm's model code is used, by the tests
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt torchvision timm
	@touch $@

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

demo: .venv/.installed
	$(BIN)/python -m sapwood.cli.main demo

zoo: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.zoo

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
