"""The one error that a person at the terminal caused and can mend: it ends an eval in a single line, exit code 2.

Anything else is a fault of ours and must never be dressed up as this one: it keeps its traceback.
"""


class InputError(Exception):
    """What the user asked for can't be done; the message names the argument, its value and what is accepted."""


def first_line(error: BaseException) -> str:
    """The first line that says something in `error`'s message; libraries add paragraphs of advice to theirs."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
