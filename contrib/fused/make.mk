LONG_TESTS += test-kernel

.PHONY: test-kernel
test-kernel: $(TOOLS) ## Hold the fused attention against the reference at the models' own shapes, in 5 minutes
	@TRITON_INTERPRET=$$($(BIN)/python -c 'import torch; print(int(not torch.cuda.is_available()))') \
	  $(BIN)/python -m pytest contrib/fused/tests/test_fused.py -m kernel -s $(ARGS)
