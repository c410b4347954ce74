.PHONY: golden
golden: $(TOOLS) ## Write the golden files anew after a change of messages
	@CAIT_GOLDEN=write $(BIN)/python -m pytest tests/cli/test_golden.py $(wildcard contrib/tests/test_contrib_golden.py) $(ARGS)
