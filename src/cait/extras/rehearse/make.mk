.PHONY: rehearse
rehearse: $(READY) ## Try the run of CONFIG for three minutes: memory, hours, what is slow, stop and resume
	@$(BIN)/cait rehearse $(addprefix --config ,$(CONFIG)) $(call option,--data.root,$(DATA)) $(ARGS)
