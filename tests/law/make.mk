LONG_TESTS += laws

.PHONY: laws
laws: $(TOOLS) ## Try the laws of docs/laws.md on all pairs of settings, or on other situations with SEED=n
	@SEED=$(or $(SEED),0) $(BIN)/python -m pytest tests/law/test_pairs.py -m '' -n 2 --dist worksteal $(ARGS)
