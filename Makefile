# Every target sets itself up: virtual environment, dependencies, this package in editable mode. `make help` lists them.

PYTHON  ?= python3
VENV    ?= .venv
ARGS    ?=
# pytest processes, and torch threads in each: small matrices gain nothing from a second thread.
WORKERS ?= 2
THREADS ?= 1
# What pip is asked for before anything else. The exact release lets pip's own configuration (find-links, extra index)
# answer with a CPU build where there is one; a plain `torch` may fetch a newest release with gigabytes of CUDA instead.
# On Linux with a CUDA GPU the default already is the CUDA build, unless that configuration offers another one.
#   make test TORCH="torch --index-url URL"   another build or release
#   make test TORCH=                          leave the choice to pip
# A finished environment is kept: `make clean` before you change TORCH, PYTHON or EXTRAS.
TORCH   ?= torch==2.13.0
EXTRAS  ?= dev,train,demo,browser
SPACE   ?= build/space

BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-browser space docs quality format clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

install: $(STAMP)  ## build the environment in .venv; the other targets do it by themselves

# The stamp comes last, so an interrupted set-up starts again; a changed pyproject.toml rebuilds the environment.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	@echo "Setting up $(VENV) (once, a few minutes) ..."
	$(PYTHON) -m venv --clear $(VENV)
ifneq ($(strip $(TORCH)),)
	$(BIN)/python -m pip install -q $(TORCH)
endif
	$(BIN)/python -m pip install -q -e ".[$(EXTRAS)]"
	@touch $@

demo: $(STAMP)  ## generate with and without the drafter, side by side; ARGS="--dtype float32"
	$(BIN)/python examples/demo.py $(ARGS)

test: $(STAMP)  ## the tests without the slow ones; ARGS="-k flow"
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(STAMP)  ## all tests, the slow ones too
	$(PYTEST) $(ARGS)

test-browser: $(STAMP)  ## the demo in a real browser (chromium and chromedriver); ARGS="-k stop"
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest tests/browser $(ARGS)

space:  ## put together what the Hugging Face Space holds, in build/space; hf upload OWNER/NAME build/space --repo-type space
	rm -rf $(SPACE)
	mkdir -p $(SPACE)/hub_cards
	cp -r hub_cards/space/. app.py flashmap_hf $(SPACE)
	cp -r hub_cards/flashmap-smollm2-135m $(SPACE)/hub_cards
	find $(SPACE) -name __pycache__ -type d -prune -exec rm -rf {} +

docs: $(STAMP)  ## the documentation, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

quality: $(STAMP)  ## lint, format and types, exactly as CI checks them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## format, and mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment, caches and build files
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
