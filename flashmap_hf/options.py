"""One dataclass per command: its fields are the command line, and their help is the documentation."""

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, field
from typing import Any, NoReturn, TypeVar

from transformers import HfArgumentParser

Options = TypeVar("Options")


def option(default: Any = MISSING, help: str = "", factory: Any = MISSING) -> Any:
    """A field with a line of help; a required one where neither a default nor a factory is given."""
    return field(default=default, default_factory=factory, metadata={"help": help})


class Formatter(argparse.HelpFormatter):
    """Help with one name and one default for each option."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = action.default in (None, False, [], argparse.SUPPRESS) or action.required
        return text if silent or "default" in text else text + " (default: %(default)s)"

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return "" if action.const is True else super()._format_args(action, default_metavar)


class OptionParser(HfArgumentParser):
    """Reports a bad argument in one line, as everything else here does."""

    def __init__(self, options: Any, **kwargs: Any):
        super().__init__(options, formatter_class=Formatter, **kwargs)
        for action in self._actions:  # underscores are understood, and not shown
            dashed = [name for name in action.option_strings if "_" not in name]
            action.option_strings = dashed or action.option_strings

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parse(options: type[Options], argv: Sequence[str], prog: str, description: str | None = None) -> Options:
    """The dataclass `options`, filled from the command line.

    Raises:
        ValueError: an argument is unknown, missing or of another type, or the dataclass refuses its value.
    """
    parser = OptionParser(options, prog=prog, description=description)
    parsed: Any = parser.parse_args_into_dataclasses(
        list(argv), return_remaining_strings=True, look_for_args_file=False
    )
    if parsed[-1]:
        parser.error(f"unknown arguments: {' '.join(parsed[-1])}")
    filled: Options = parsed[0]
    return filled
