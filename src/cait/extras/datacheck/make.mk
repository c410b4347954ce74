.PHONY: imagenet-check
imagenet-check: $(READY) ## Count the classes and images of the folder DATA, decode some, name what is wrong
	@$(BIN)/cait imagenet-check $(call option,,$(DATA)) $(ARGS)
