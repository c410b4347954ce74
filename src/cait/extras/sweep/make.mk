.PHONY: sweep
sweep: $(READY) ## Search the settings of the file SPACE for the best run; again to go on, ARGS="--jobs 2"
	@$(BIN)/cait sweep $(call option,,$(SPACE)) $(ARGS)
