.PHONY: visualize
visualize: $(READY) ## Draw what the run RUN sees in IMAGES (files or folders), its curves and its worst mistakes
	$(call verb,visualize,$(if $(IMAGES),--images $(IMAGES)))

.PHONY: compare
compare: $(READY) ## Show what differs between the runs RUNS="a b", and their curves over each other
	@$(BIN)/cait compare $(RUNS) $(ARGS)
