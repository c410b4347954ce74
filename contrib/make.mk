.PHONY: test-contrib
test-contrib: $(TOOLS) ## Run the tests of contrib/
	@$(BIN)/python -m pytest contrib -n 3 --dist worksteal $(ARGS)
