"""Arguments of a command, a mistake among which is told in one line, as every other mistake is."""

import argparse
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, without the list of all arguments above the message."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and where help is, and ends with status 2."""
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists the arguments\n")
