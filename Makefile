# Two commands set everything up: `make train` and `make test`. `make help` lists the rest.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

# Where this is set, as in many containers, every start would compile thousands of modules anew, for some seconds.
export PYTHONDONTWRITEBYTECODE :=
# Messages then name the targets of this file.
export CAIT_MAKE := 1

PYTHON ?= python3
CONFIG ?= configs/digits.yaml

# A folder of images gets a recipe of its own, unless a configuration is asked for.
CHOSEN := $(and $(DATA),$(filter file,$(origin CONFIG)))

VENV := .venv
BIN := $(VENV)/bin
# What training needs is installed; and what tests, checks and some verbs need.
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools

# One word for the shell, whatever is in it.
quoted = '$(subst ','\'',$(1))'

# Run a verb of cait on the run RUN; the second argument are further words.
verb = @$(BIN)/cait $(1) $(call option,,$(RUN)) $(2) $(ARGS)
# An option and its value, if there is one.
option = $(if $(2),$(if $(1),$(1) )$(call quoted,$(2)))

.PHONY: help
help: ## Show this list
	@echo "make TARGET [CONFIG=file.yaml] [RUN=name] [ARGS=\"--key value ...\"]"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'
	@echo "and the other verbs of cait, as make VERB [RUN=name] [ARGS=...]:"
	@PYTHONPATH=src $(or $(wildcard $(BIN)/python),$(PYTHON)) -m cait --help 2>/dev/null | grep -E '^  ($(subst $() ,|,$(strip $(PLAIN)))) ' || echo "  $(PLAIN)"

.PHONY: train
train: $(READY) ## Train on the folder DATA of class folders, or CaiT on the embedded digits; FROM=FILE|timm|RUN|none
	@$(BIN)/cait fit $(or $(call option,--paper,$(PAPER)),$(if $(CHOSEN),,$(addprefix --config ,$(CONFIG)))) $(call option,--data.root,$(DATA)) $(call option,--from,$(FROM)) $(call option,--run_name,$(RUN)) $(ARGS)

.PHONY: eval
eval: $(READY) ## Score the best checkpoint of the run RUN, or the row PAPER, on the validation set
	$(call verb,eval,$(call option,--paper,$(PAPER)))

.PHONY: predict
predict: $(READY) ## Classify IMAGES (files or folders) with the run RUN
	$(call verb,predict,$(IMAGES))

-include src/cait/extras/*/make.mk contrib/make.mk contrib/*/make.mk benchmarks/make.mk tests/*/make.mk

# Every verb without a target of its own.
VERBS := $(shell sed -n 's/^    "\([a-z-]*\)": Verb.*/\1/p' src/cait/cli/command.py $(wildcard src/cait/extras/*/__init__.py contrib/*/__init__.py))
PLAIN := $(filter-out fit $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(MAKEFILE_LIST)),$(VERBS))
.PHONY: $(PLAIN)
$(PLAIN): $(READY)
	$(call verb,$@)

.PHONY: tensorboard
tensorboard: $(READY) ## Show the curves of all runs in a browser
	@$(BIN)/tensorboard --logdir logs $(ARGS)

.PHONY: test
test: $(TOOLS) ## Run the fast tests (unit, oracle, law, cli, system, every extra), in 4 to 8 minutes on 2 cores
	@$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

.PHONY: test-all
test-all: $(TOOLS) ## Run all tests there are, each part whether another fails or not
	@$(MAKE) --keep-going test-long test-two $(LONG_TESTS)

.PHONY: test-long
test-long: $(TOOLS) ## Run the tests of every part and the longer ones
	@$(BIN)/python -m pytest tests $(wildcard tests/house contrib) src/cait/extras -n 3 --dist worksteal -m 'not kernel' $(ARGS)

.PHONY: test-two
test-two: $(TOOLS) ## Run the tests of the command line with every run on two processes
	@CAIT_TEST_DEVICES=2 $(BIN)/python -m pytest tests/cli/test_cli.py tests/cli/test_evaluation.py $(ARGS)

.PHONY: docs
docs: $(TOOLS) ## Build the pages as a site with search in .site/html
	@$(BIN)/python docs/site.py

.PHONY: docs-check
docs-check: $(TOOLS) ## Run the commands and the notebook of README.md and docs/ in a scratch copy, in 10 to 15 minutes
	@$(BIN)/python docs/check.py

.PHONY: package
package: $(TOOLS) ## Build the wheels and the sdist in dist/, and try the wheel in an empty environment (needs uv)
	@rm -rf dist .package
	@$(BIN)/hatchling build
	@cd contrib && ../$(BIN)/hatchling build -t wheel -d ../dist
	@uvx twine@7.0.0 check --strict dist/*
	@$(BIN)/python -m pytest -m '' tests/system/test_package.py
	@PACKAGE=$$(echo dist/cait_lightning-*.whl) PYTHON='$(PYTHON)' scripts/setup.sh .package constraints-dev.txt $(TORCH)
	@scripts/try_package.sh .package/bin/cait

.PHONY: lint
lint: $(TOOLS) ## Check style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

.PHONY: setup
setup: $(TOOLS) ## Only create .venv and install; other targets do this by themselves. TORCH=cpu, cu126, auto ...

.PHONY: clean
clean: ## Remove .venv and caches; data and logs stay
	rm -rf $(VENV) .package .site dist .mypy_cache .pytest_cache .ruff_cache

PIN := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
  --custom-compile-command "make lock" pyproject.toml
.PHONY: lock
lock: ## Pin all packages anew in constraints*.txt, with their hashes; keeps the versions that still fit (needs uv)
	@$(PIN) --extra dev --output-file constraints-dev.txt
	@$(PIN) --extra build --constraint constraints-dev.txt --output-file constraints.txt
	@sed -nE 's/^([A-Za-z0-9][^ ]*==[^\\]*[^\\ ]) *\\?$$/\1/p' constraints-dev.txt >src/cait/constraints.txt

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) once:"
	@PYTHON='$(PYTHON)' scripts/setup.sh $(VENV) constraints.txt $(TORCH)
	@touch $@
	@echo "$(VENV) is ready."

$(TOOLS): pyproject.toml constraints-dev.txt | $(READY)
	@echo "Adding what tests and checks need:"
	@PYTHON='$(PYTHON)' scripts/setup.sh $(VENV) constraints-dev.txt $(TORCH)
	@touch $@
