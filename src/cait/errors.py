"""The one exception for everything that a user can mend."""


class UserError(ValueError):
    """Bad input: the message is one line that says what was wrong and what to do.

    The command line prints the message without a traceback and exits with status 2.
    """
