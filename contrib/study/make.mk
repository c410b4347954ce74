.PHONY: study
study: $(READY) ## Does depth pay? LayerScale and its rivals at 6 to 48 blocks, in 30 minutes on 2 cores; SIZE=full, DATA=folder
	@$(BIN)/cait study $(call option,--size,$(SIZE)) $(call option,--data,$(DATA)) $(ARGS)
