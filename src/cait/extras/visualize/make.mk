.PHONY: visualize
visualize: $(READY) ## Draw what the run RUN sees in IMAGES (files or folders), its curves and its worst mistakes
	$(call verb,visualize,$(if $(IMAGES),--images $(IMAGES)))

.PHONY: compare
compare: $(READY) ## Show the curves of RUN; or what differs between RUNS="a b", and their curves over each other
	$(call verb,compare,$(RUNS))
