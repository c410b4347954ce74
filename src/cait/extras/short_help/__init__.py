"""`cait fit --help` lists the settings that runs use most, and `--help=model` the network's fields, without torch."""


def fit_help(arguments: list[str]) -> str:
    from cait.extras.short_help import text

    topic = text.topic(arguments)
    if topic == "all":
        return ""
    return text.fields() if topic else text.fit()
