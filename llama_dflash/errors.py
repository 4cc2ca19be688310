"""What can go wrong, by kind; the command line turns each into one line and an exit code."""

from __future__ import annotations


class DFlashError(Exception):
    """A failure with a message for the user.

    Args:
        message: what, value, what was expected; one line.
        hint: what to do next; one line, shown after the message.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}; {self.hint}" if self.hint else message


class UsageError(DFlashError):
    """Options that cannot be meant."""

    exit_code = 2


class ModelFileError(DFlashError):
    """A model file that is missing, damaged or of the wrong kind."""


class PairingError(DFlashError):
    """A draft that does not fit its target."""


class BuildError(DFlashError):
    """A native build that is missing or could not be made."""


class ServerError(DFlashError):
    """llama-server did not start, died, or answered with an error."""
