.PHONY: house
house: $(TOOLS) ## Run the tests of this repository's own discipline: sizes, imports, the pages' figures
	@$(BIN)/python -m pytest tests/house -n 3 --dist worksteal $(ARGS)
