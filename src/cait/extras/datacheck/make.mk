.PHONY: check
check: $(READY) ## Count the classes and images of the folder DATA, decode some, name what is wrong
	@$(BIN)/cait check $(call option,,$(DATA)) $(ARGS)
