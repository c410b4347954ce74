"""Train on a folder of images without a configuration: look at the folder, choose a recipe, say why."""

from cait.run.program import Program


def replace_arguments(verb: str, arguments: list[str], program: Program) -> list[str]:
    """Put the recipe of a folder in front of the settings given beside it."""
    if verb != "fit" or program.module or program.data:  # the rules know the settings of the package's own classes
        return arguments
    from cait.extras.recipe.chooser import replace_folder

    return replace_folder(arguments, program)
