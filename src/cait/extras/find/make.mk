.PHONY: find-lr find-batch
find-lr: $(READY) ## Draw the loss of CONFIG over a rising learning rate, and suggest one
	@$(BIN)/cait find-lr $(or $(call option,--paper,$(PAPER)),$(addprefix --config ,$(CONFIG))) $(ARGS)

find-batch: $(READY) ## Find the largest batch of CONFIG that fits into memory; on the CPU ARGS="--max 256"
	@$(BIN)/cait find-batch $(or $(call option,--paper,$(PAPER)),$(addprefix --config ,$(CONFIG))) $(ARGS)
