.PHONY: shards
shards: $(READY) ## Pack the data set DATA into chunks in the folder OUT, to train from it or from S3
	@$(BIN)/cait shards $(call option,,$(DATA)) $(call option,,$(OUT)) $(ARGS)
