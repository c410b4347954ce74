.PHONY: crossval
crossval: $(READY) ## Train on every fold of DATA=folder under the name RUN=name; 5 folds, or ARGS="--data.folds K"
	@$(BIN)/cait crossval $(RUN) $(call option,--data.root,$(DATA)) $(ARGS)
