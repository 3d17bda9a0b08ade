"""One small hierarchy of errors; every message says what is wrong, why, and what to do.

The command line prints the message as one line and exits with code 2, so a message never spans lines.
"""


class StobatchError(Exception):
    """Anything a user can cause and mend. `remedy` is the sentence that says how."""

    told = False
    """Whether this is the process, of several that fail together, that tells the user."""

    def __init__(self, what: str, *, why: str = "", remedy: str) -> None:
        what, why, remedy = (_printable(text) for text in (what, why, remedy))
        self.what, self.why, self.remedy = what, why, remedy
        super().__init__(" ".join(sentence for sentence in (what, why, remedy) if sentence))


LONGEST = 2000
"""Characters of one sentence of a message; what is quoted in it may be a whole file."""


def _printable(text: str) -> str:
    r"""Return one line that every terminal takes: other characters are written as in Python source.

    >>> print(_printable("two\nlines"))
    two\nlines
    """
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class SettingError(StobatchError):
    """A configuration key or value that is not allowed."""


class BudgetError(StobatchError):
    """A privacy budget that cannot be split as asked."""


class DataError(StobatchError):
    """Data that is missing, truncated, altered or out of range."""


class ModelError(StobatchError):
    """A network that does not fit the mechanism."""


class UnitError(StobatchError):
    """Two quantities with different units were compared or combined."""


class RunError(StobatchError):
    """A run directory that is incomplete, belongs to another configuration, or cannot be written."""


class EndedElsewhere(StobatchError):  # noqa: N818
    """Another process of the same training failed, or was stopped, and has said so; this one ends without a word."""

    def __init__(self, what: str, *, code: int = 2) -> None:
        self.code = code
        super().__init__(what, remedy="")
