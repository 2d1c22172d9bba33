"""One dataclass per command: its fields are the command line, and their help is the documentation."""

from collections.abc import Sequence
from dataclasses import MISSING, field
from typing import Any, NoReturn, TypeVar

from transformers import HfArgumentParser

Options = TypeVar("Options")


def option(default: Any = MISSING, help: str = "", factory: Any = MISSING) -> Any:
    """A field with a line of help; a required one where neither a default nor a factory is given."""
    return field(default=default, default_factory=factory, metadata={"help": help})


class OptionParser(HfArgumentParser):
    """Reports a bad argument in one line, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parse(options: type[Options], argv: Sequence[str], prog: str, description: str | None = None) -> Options:
    """The dataclass `options`, filled from the command line.

    Raises:
        ValueError: an argument is unknown, missing or of another type, or the dataclass refuses its value.
    """
    parser = OptionParser(options, prog=prog, description=description)  # type: ignore[arg-type]
    parsed: Any = parser.parse_args_into_dataclasses(
        list(argv), return_remaining_strings=True, look_for_args_file=False
    )
    if parsed[-1]:
        parser.error(f"unknown arguments: {' '.join(parsed[-1])}")
    filled: Options = parsed[0]
    return filled
