.PHONY: torture
torture: $(TOOLS) ## Kill and resume a run N times and compare its end, bit for bit, with one left alone
	@$(BIN)/python benchmarks/torture.py --kills $(or $(N),50) $(ARGS)

.PHONY: bench
bench: $(READY) ## Time a training step beside timm's CaiT, on this machine
	@$(BIN)/python benchmarks/step.py --out benchmarks $(ARGS)

.PHONY: bench-input
bench-input: $(READY) ## Time augmentation and loaders beside timm's and torchvision's, in 5 minutes
	@$(BIN)/python benchmarks/input.py --out benchmarks $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(READY) ## Run the tests and the measurements that want a GPU, in three stages of nine minutes
	@$(BIN)/python benchmarks/gpu.py $(ARGS)
