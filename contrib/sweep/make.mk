.PHONY: sweep
sweep: $(TOOLS) ## Search the settings of the file SPACE for the best run; again to go on
	@$(BIN)/cait sweep $(call option,,$(SPACE)) $(ARGS)
