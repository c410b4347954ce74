# Two commands set everything up: `make train` and `make test`. `make help` lists the rest.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

# Where this is set, as in many containers, every start would compile thousands of modules anew, for some seconds.
export PYTHONDONTWRITEBYTECODE :=

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
TORCH ?=
SPACE ?=
IMAGES ?=
TO ?=
FROM ?=
ARGS ?=

# A folder of images gets a recipe of its own, unless a configuration is asked for.
CHOSEN := $(and $(DATA),$(filter file,$(origin CONFIG)))

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# One word for the shell, whatever is in it.
quoted = '$(subst ','\'',$(1))'

.PHONY: help
help: ## Show this list
	@echo "make TARGET [CONFIG=file.yaml | PAPER=table/row] [RUN=name] [ARGS=\"--key value ...\"]"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

.PHONY: train
train: $(READY) ## Train on the folder DATA of class folders, or CaiT on the embedded digits; FROM=FILE|timm|RUN
	@$(BIN)/cait fit $(if $(PAPER),--paper $(call quoted,$(PAPER)),$(if $(CHOSEN),,$(addprefix --config ,$(CONFIG)))) $(if $(DATA),--data.root $(call quoted,$(DATA))) $(if $(FROM),--from $(call quoted,$(FROM))) $(if $(RUN),--run_name $(call quoted,$(RUN))) $(ARGS)

.PHONY: resume
resume: $(READY) ## Go on with the run RUN where it stopped, in its folder
	@$(BIN)/cait resume $(if $(RUN),$(call quoted,$(RUN))) $(ARGS)

.PHONY: eval
eval: $(READY) ## Score the best checkpoint of the run RUN, or the row PAPER, on the validation set
	@$(BIN)/cait $(if $(PAPER),validate --paper $(call quoted,$(PAPER)),eval $(if $(RUN),$(call quoted,$(RUN)))) $(ARGS)

.PHONY: predict
predict: $(READY) ## Classify IMAGES (files or folders) with the run RUN
	@$(BIN)/cait predict $(if $(RUN),$(call quoted,$(RUN))) $(IMAGES) $(ARGS)

.PHONY: demo
demo: $(READY) ## Write a page that runs the run RUN in a browser
	@$(BIN)/cait demo $(if $(RUN),$(call quoted,$(RUN))) $(ARGS)

.PHONY: export
export: $(READY) ## Take the run RUN out: for timm, or ARGS="--format release|onnx|torch_export"
	@$(BIN)/cait export $(if $(RUN),$(call quoted,$(RUN))) $(ARGS)

.PHONY: card
card: $(READY) ## Write the model card of the run RUN, README.md as the Hugging Face Hub shows it
	@$(BIN)/cait card $(if $(RUN),$(call quoted,$(RUN))) $(ARGS)

.PHONY: push
push: $(READY) ## Put the run RUN on the Hugging Face Hub for timm: TO=owner/name, ARGS=--dry-run shows what would go
	@$(BIN)/cait push $(if $(RUN),$(call quoted,$(RUN))) $(if $(TO),$(call quoted,$(TO))) $(ARGS)

.PHONY: consolidate
consolidate: $(READY) ## Write a checkpoint of the run RUN, trained with fsdp2, as one file
	@$(BIN)/cait consolidate $(if $(RUN),$(call quoted,$(RUN))) $(ARGS)

.PHONY: visualize
visualize: $(READY) ## Draw what the run RUN sees in IMAGES (files or folders), its curves and its worst mistakes
	@$(BIN)/cait visualize $(if $(RUN),$(call quoted,$(RUN))) $(if $(IMAGES),--images $(IMAGES)) $(ARGS)

.PHONY: plot
plot: $(READY) ## Draw the curves of the run RUN and the heat maps of its layers
	@$(BIN)/cait plot $(if $(RUN),$(call quoted,$(RUN))) $(ARGS)

.PHONY: runs
runs: $(READY) ## List the runs in logs/: epochs, best accuracy, whether they run or are finished
	@$(BIN)/cait runs $(ARGS)

.PHONY: compare
compare: $(READY) ## Show what differs between the runs RUNS="a b", and their curves over each other
	@$(BIN)/cait compare $(RUNS) $(ARGS)

.PHONY: replay
replay: $(READY) ## Show what step STEP of the run RUN saw: images, loss, gradients
	@$(BIN)/cait replay $(if $(RUN),$(call quoted,$(RUN))) $(if $(STEP),--step $(call quoted,$(STEP))) $(ARGS)

.PHONY: zoo
zoo: $(READY) ## Show the paper's ten models, their size, cost and published accuracy
	@$(BIN)/cait zoo $(ARGS)

.PHONY: paper
paper: $(READY) ## List the rows of the paper's tables, each a run: PAPER=table1/layerscale-36
	@$(BIN)/cait paper $(ARGS)

.PHONY: imagenet-check
imagenet-check: $(READY) ## Count the classes and images of the folder DATA, decode some, name what is wrong
	@$(BIN)/cait imagenet-check $(if $(DATA),$(call quoted,$(DATA))) $(ARGS)

.PHONY: shards
shards: $(READY) ## Pack the data set DATA into chunks in the folder OUT, to train from it or from S3
	@$(BIN)/cait shards $(if $(DATA),$(call quoted,$(DATA))) $(if $(OUT),$(call quoted,$(OUT))) $(ARGS)

.PHONY: study
study: $(READY) ## Does depth pay? LayerScale and its rivals at 6 to 48 blocks, in 30 minutes on 2 cores; SIZE=full, DATA=folder
	@$(BIN)/cait study $(if $(SIZE),--size $(call quoted,$(SIZE))) $(if $(DATA),--data $(call quoted,$(DATA))) $(ARGS)

.PHONY: sweep
sweep: $(READY) ## Search the settings of the file SPACE for the best run; again to go on, ARGS="--jobs 2"
	@$(BIN)/cait sweep $(if $(SPACE),$(call quoted,$(SPACE))) $(ARGS)

.PHONY: find-lr
find-lr: $(READY) ## Draw the loss of CONFIG over a rising learning rate, and suggest one
	@$(BIN)/cait find-lr $(if $(PAPER),--paper $(call quoted,$(PAPER)),$(addprefix --config ,$(CONFIG))) $(ARGS)

.PHONY: find-batch
find-batch: $(READY) ## Find the largest batch of CONFIG that fits into memory; on the CPU ARGS="--max 256"
	@$(BIN)/cait find-batch $(if $(PAPER),--paper $(call quoted,$(PAPER)),$(addprefix --config ,$(CONFIG))) $(ARGS)

.PHONY: completion
completion: $(READY) ## Print the completion of `cait` for a shell: source <(make -s completion), ARGS=zsh
	@$(BIN)/cait --print_completion $(or $(ARGS),bash)

.PHONY: tensorboard
tensorboard: $(READY) ## Show the curves of all runs in a browser
	@$(BIN)/tensorboard --logdir logs $(ARGS)

.PHONY: test
test: $(READY) ## Run the tests of every part, in about 5 minutes on 2 cores
	@$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

.PHONY: test-all
test-all: $(READY) ## Run all tests there are, each part whether another fails or not
	@$(MAKE) --keep-going test-long test-two test-kernel

.PHONY: test-long
test-long: $(READY) ## Run the tests of every part and the longer ones
	@$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not kernel' $(ARGS)

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
setup: $(READY) ## Only create .venv and install; every other target does this by itself. TORCH=cpu: without CUDA

.PHONY: clean
clean: ## Remove .venv and caches; data and logs stay
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache

.PHONY: lock
lock: ## Pin all packages anew in constraints.txt, with their hashes; keeps the versions that still fit (needs uv)
	@uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock" --extra dev \
	  pyproject.toml --output-file constraints.txt

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) once, some minutes:"
	@PYTHON='$(PYTHON)' scripts/setup.sh $(VENV) $(TORCH)
	@touch $@
	@echo "$(VENV) is ready."
