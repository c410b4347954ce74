"""Complete verbs, settings and the names of runs in bash and zsh."""

from cait.plugins import Verb

VERBS = {
    "--print_completion": Verb(
        "cait.extras.completion.script:show",
        "complete verbs, settings and runs in a shell:\nsource <(cait --print_completion bash|zsh)",
        takes="files",
    )
}
