.PHONY: test-cluster
test-cluster: $(TOOLS) ## Train through faults on a SLURM of three machines, made on this one (root, Debian's slurm-wlm)
	@$(BIN)/python -m pytest tests/system/cluster $(ARGS)
