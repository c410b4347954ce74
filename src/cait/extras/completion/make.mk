.PHONY: completion
completion: $(READY) ## Print the completion of `cait` for a shell: source <(make -s completion), ARGS=zsh
	@$(BIN)/cait --print_completion $(or $(ARGS),bash)
