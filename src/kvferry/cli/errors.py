"""What the command line tells a user when something can't go on."""

from __future__ import annotations


class Problem(Exception):
    """A failure that is the user's to mend: what is wrong, what to do, and the lines that show it.

    advice and details may be empty. The command line prints the three and ends with status 2.
    """

    def __init__(self, message: str, advice: str = "", details: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.details = details

    def __str__(self) -> str:
        return "\n".join(part for part in (self.message, self.details, self.advice) if part)
