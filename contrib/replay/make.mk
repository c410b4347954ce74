.PHONY: replay
replay: $(READY) ## Show what step STEP of the run RUN saw: images, loss, gradients
	$(call verb,replay,$(call option,--step,$(STEP)))
