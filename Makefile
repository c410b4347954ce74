# Two commands set everything up: `make train` and `make test`. `make help` lists the rest.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
CONFIG ?= configs/digits.yaml
PAPER ?=
RUN ?=
RUNS ?=
STEP ?=
N ?= 50
DATA ?=
OUT ?=
SIZE ?=
SPACE ?=
IMAGES ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help
help: ## Show this list
	@echo "make TARGET [CONFIG=file.yaml | PAPER=table/row] [RUN=name] [ARGS=\"--key value ...\"]"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

.PHONY: train
train: $(READY) ## Train: by default CaiT on the embedded digits, under 3 minutes on 2 cores
	@$(BIN)/cait fit $(if $(PAPER),--paper '$(PAPER)',$(addprefix --config ,$(CONFIG))) $(if $(RUN),--run_name '$(RUN)') $(ARGS)

.PHONY: resume
resume: $(READY) ## Go on with the run RUN where it stopped, in its folder
	@$(BIN)/cait resume $(if $(RUN),'$(RUN)') $(ARGS)

.PHONY: eval
eval: $(READY) ## Score the best checkpoint of the run RUN, or the row PAPER, on the validation set
	@$(BIN)/cait $(if $(PAPER),validate --paper '$(PAPER)',eval $(if $(RUN),'$(RUN)')) $(ARGS)

.PHONY: export
export: $(READY) ## Take the run RUN out: for timm, or ARGS="--format release|onnx|torch_export"
	@$(BIN)/cait export $(if $(RUN),'$(RUN)') $(ARGS)

.PHONY: consolidate
consolidate: $(READY) ## Write a checkpoint of the run RUN, trained with fsdp2, as one file
	@$(BIN)/cait consolidate $(if $(RUN),'$(RUN)') $(ARGS)

.PHONY: visualize
visualize: $(READY) ## Draw what the run RUN sees in IMAGES (files or folders), its curves and its worst mistakes
	@$(BIN)/cait visualize $(if $(RUN),'$(RUN)') $(if $(IMAGES),--images $(IMAGES)) $(ARGS)

.PHONY: plot
plot: $(READY) ## Draw the curves of the run RUN and the heat maps of its layers
	@$(BIN)/cait plot $(if $(RUN),'$(RUN)') $(ARGS)

.PHONY: compare
compare: $(READY) ## Show what differs between the runs RUNS="a b", and their curves over each other
	@$(BIN)/cait compare $(RUNS) $(ARGS)

.PHONY: replay
replay: $(READY) ## Show what step STEP of the run RUN saw: images, loss, gradients
	@$(BIN)/cait replay $(if $(RUN),'$(RUN)') $(if $(STEP),--step '$(STEP)') $(ARGS)

.PHONY: zoo
zoo: $(READY) ## Show the paper's ten models, their size, cost and published accuracy
	@$(BIN)/cait zoo $(ARGS)

.PHONY: paper
paper: $(READY) ## List the rows of the paper's tables, each a run: PAPER=table1/layerscale-36
	@$(BIN)/cait paper $(ARGS)

.PHONY: imagenet-check
imagenet-check: $(READY) ## Count the classes and images of the folder DATA, decode some, name what is wrong
	@$(BIN)/cait imagenet-check $(if $(DATA),'$(DATA)') $(ARGS)

.PHONY: shards
shards: $(READY) ## Pack the data set DATA into chunks in the folder OUT, to train from it or from S3
	@$(BIN)/cait shards $(if $(DATA),'$(DATA)') $(if $(OUT),'$(OUT)') $(ARGS)

.PHONY: study
study: $(READY) ## Does depth pay? LayerScale and its rivals at 6 to 48 blocks, in 30 minutes on 2 cores; SIZE=full, DATA=folder
	@$(BIN)/cait study $(if $(SIZE),--size '$(SIZE)') $(if $(DATA),--data '$(DATA)') $(ARGS)

.PHONY: sweep
sweep: $(READY) ## Search the settings of the file SPACE for the best run; again to go on, ARGS="--jobs 2"
	@$(BIN)/cait sweep $(if $(SPACE),'$(SPACE)') $(ARGS)

.PHONY: find-lr
find-lr: $(READY) ## Draw the loss of CONFIG over a rising learning rate, and suggest one
	@$(BIN)/cait find-lr $(if $(PAPER),--paper '$(PAPER)',$(addprefix --config ,$(CONFIG))) $(ARGS)

.PHONY: find-batch
find-batch: $(READY) ## Find the largest batch of CONFIG that fits into memory; on the CPU ARGS="--max 256"
	@$(BIN)/cait find-batch $(if $(PAPER),--paper '$(PAPER)',$(addprefix --config ,$(CONFIG))) $(ARGS)

.PHONY: completion
completion: $(READY) ## Print the completion of `cait` for a shell: source <(make -s completion), ARGS=zsh
	@$(BIN)/cait --print_completion $(or $(ARGS),bash)

.PHONY: tensorboard
tensorboard: $(READY) ## Show the curves of all runs in a browser
	@$(BIN)/tensorboard --logdir logs $(ARGS)

.PHONY: test
test: $(READY) ## Run the tests of every part, in about 7 minutes on 2 cores
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

.PHONY: test-all
test-all: $(READY) ## Run all tests there are: the longer ones, test-two and test-kernel too
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not kernel' $(ARGS)
	@$(MAKE) test-two test-kernel

.PHONY: test-two
test-two: $(READY) ## Run the tests of the command line with every run on two processes
	@CAIT_TEST_DEVICES=2 $(BIN)/python -m pytest tests/test_cli.py tests/test_evaluation.py tests/test_export.py $(ARGS)

.PHONY: test-kernel
test-kernel: $(READY) ## Hold the fused attention against the reference at the models' own shapes, in 5 minutes
	@TRITON_INTERPRET=$$($(BIN)/python -c 'import torch; print(int(not torch.cuda.is_available()))') \
	  $(BIN)/python -m pytest tests/test_fused.py -m kernel -s $(ARGS)

.PHONY: torture
torture: $(READY) ## Kill and resume a run N times and compare its end, bit for bit, with one left alone
	@$(BIN)/python benchmarks/torture.py --kills $(N) $(ARGS)

.PHONY: bench
bench: $(READY) ## Time a training step beside timm's CaiT, on this machine
	@$(BIN)/python benchmarks/step.py --out benchmarks $(ARGS)

.PHONY: bench-input
bench-input: $(READY) ## Time decoding, augmentation and loaders beside timm's and torchvision's, in 5 minutes
	@$(BIN)/python benchmarks/input.py --out benchmarks $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(READY) ## Run the tests and the measurements that want a GPU, in three stages of nine minutes
	@$(BIN)/python benchmarks/gpu.py $(ARGS)

.PHONY: docs-check
docs-check: $(READY) ## Run the commands of README.md and docs/ in a scratch copy, in about 10 minutes on 2 cores
	@$(BIN)/python docs/check.py

.PHONY: lint
lint: $(READY) ## Check style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

.PHONY: setup
setup: $(READY) ## Only create .venv and install; every other target does this by itself

.PHONY: clean
clean: ## Remove .venv and caches; data and logs stay
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "Setting up $(VENV) once: PyTorch with CUDA and all else in their pinned versions, 6 GB, some minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
	@echo "$(VENV) is ready."
