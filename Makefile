# Two commands: `make serve` and `make test`. Each makes its environment, once.
#
#   PYTHON  the interpreter to start from (3.11 or newer)
#   VENV    where the environment goes
#   TORCH   torch's version, or a local wheel; a torch that VENV already has is kept
#           (without an NVIDIA GPU: the CPU build, unless pip is set to an index of your choice)
#   ARGS    flags for the server, as in  make serve ARGS="--model Qwen/Qwen3-0.6B --port 8000"

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=
# Three processes on two cores, because many tests wait: 619 s instead of 712.
PYTEST_ARGS ?= -n 3 --dist worksteal

BIN := $(VENV)/bin

.PHONY: help serve shell test check docs wheel install install-dev clean

help:
	@echo "make serve   install what is needed and serve the built-in model on http://127.0.0.1:1919"
	@echo "make shell   the same, with a chat in this terminal"
	@echo "make test    install what is needed and run the tests"
	@echo "make check   lint, types, import layers"
	@echo "make wheel   build a wheel in dist/, with the C++ kernels compiled"
	@echo "make docs    run the documented commands (minutes)"

serve: install
	$(BIN)/python -m minisgl $(ARGS)

shell: install
	$(BIN)/python -m minisgl chat $(ARGS)

test: install-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: install-dev
	$(BIN)/ruff check python tests training scripts
	$(BIN)/ruff format --check python tests training scripts
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install-dev
	$(BIN)/python scripts/check_docs.py

# Its C++ kernels are compiled for the common instruction sets: it needs no compiler where it is installed.
wheel: install
	$(BIN)/python -m minisgl.kernel.build --ahead
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps -w dist .

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) scripts/install.py --venv $(VENV) --torch '$(TORCH)'
	@touch $@

# If nothing is there yet, the kernels are compiled while the packages of [dev] are installed.
$(VENV)/.installed-dev: pyproject.toml $(wildcard $(VENV)/.installed)
	@$(PYTHON) scripts/install.py --venv $(VENV) --torch '$(TORCH)' --extra dev $(if $(wildcard $(VENV)/.installed),--added)
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
