.PHONY: house
house: $(TOOLS) ## Run the tests of this repository's own discipline: sizes, imports, the pages' figures
	@$(BIN)/python -m pytest tests/house -n 3 --dist worksteal $(ARGS)

.PHONY: own
own: $(TOOLS) ## Make a project of your own: NAME=mypackage KEEP="recipe visualize" [CAIT=no] (docs/your_project.md)
	@$(BIN)/python scripts/own.py $(call option,,$(NAME)) --keep '$(KEEP)' $(call option,--cait,$(CAIT))
	@$(BIN)/python -m pip uninstall --quiet --yes cait-lightning 2>/dev/null || true
	-@PATH="$(abspath $(BIN)):$$PATH" $(MAKE) lock
	@$(MAKE) test

.PHONY: rename
rename: ## Only give the package a name of your own: NAME=mypackage
	@$(PYTHON) scripts/rename.py $(call option,,$(NAME)) $(ARGS)
