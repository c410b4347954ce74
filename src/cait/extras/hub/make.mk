.PHONY: push
push: $(READY) ## Put the run RUN on the Hugging Face Hub for timm: TO=owner/name, ARGS=--dry-run shows what would go
	$(call verb,push,$(call option,,$(TO)))
