"""The `flashmap` command: one dispatcher; each further command is a module with a dataclass `Options` and `main`."""

import argparse
import dataclasses
import importlib
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_args

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from flashmap_hf import FlashMapDrafter, chat_template_differs, check_target, drafters, prompts, record, targets
from flashmap_hf.compare import compare
from flashmap_hf.comparison_table import print_comparison, show_text
from flashmap_hf.devices import DTYPES, choose_dtype, default_device
from flashmap_hf.generation_config import Verification
from flashmap_hf.options import parse
from flashmap_hf.provenance import provenance
from flashmap_hf.runs import Settings, run

USAGE_ERROR, INTERRUPTED, READER_GONE = 2, 130, 141

# name -> module (imported when the command runs: some are slow to import), what it does
COMMANDS = {
    "prompts": ("training.prompts", "let a target write prompts, in its users' place"),
    "respond": ("training.respond", "let a target answer prompts"),
    "features": ("training.features", "one target forward per answer: what a drafter is trained on"),
    "train": ("training.train", "train a drafter, or adapt one (--lora)"),
    "baselines": ("training.baselines", "train the drafters that FlashMap is compared with"),
    "evaluate": ("evaluation.acceptance", "measure a drafter through the real generate"),
    "bench": ("evaluation.bench", "compare FlashMap with the alternatives, side by side"),
    "results": ("evaluation.results_page", "write the page of results from benchmark.json"),
    "splice": ("training.splice", "show whether a drafter has learnt the coupling between its positions"),
    "card": ("hub_card", "write a drafter's card from its measurements"),
    "push": ("hub_push", "upload a drafter's folder to the Hub"),
    "demo": ("demo.command", "open the demo in a browser: your prompt, plain and with a drafter, side by side"),
    "list": ("hub_list", "find drafters for a target on the Hub"),
}


class Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. What the user can mend is one line on stderr and code 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if argv and argv[0] in COMMANDS:
            module = load_command(argv[0])
            module.main(parse(module.Options, argv[1:], f"flashmap {argv[0]}", module.__doc__))
            return 0
        args = build_parser().parse_args(argv)
        command: Callable[[argparse.Namespace], None] = args.command
        command(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `flashmap generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains again at exit
        return READER_GONE
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"flashmap: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    return 0


def load_command(name: str) -> Any:
    """The module behind a command; raises ValueError where it needs a library of an extra that is not installed."""
    try:
        return importlib.import_module(f"flashmap_hf.{COMMANDS[name][0]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("flashmap_hf"):
            raise
        extra = "demo" if name == "demo" else "train"
        raise ValueError(f"{name} needs {str(error.name).split('.')[0]}: pip install 'flashmap-hf[{extra}]'") from error


def build_parser() -> Parser:
    parser = Parser(prog="flashmap", description="Flow-map speculative decoding for Hugging Face transformers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_generate(commands.add_parser("generate", help="continue a prompt, faster with a drafter, with the same law"))
    for name, (_, what) in COMMANDS.items():  # for the list only: they parse their own arguments
        commands.add_parser(name, help=what, add_help=False)
    return parser


# --- flashmap generate ----------------------------------------------------------------------------------------------


def add_generate(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.description = "Continue a prompt; the text streams to stdout."
    parser.set_defaults(command=generate)
    parser.add_argument("prompt", help="the user's turn; '-' reads it from stdin")
    parser.add_argument(
        "--target",
        default=targets.SMOLLM2.name,
        help=f"an embedded target ({', '.join(targets.available())}), a folder or a Hub id (default: %(default)s)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--drafter", help="a folder or a Hub id (default: the one trained for the embedded target)")
    which.add_argument("--no-drafter", action="store_true", help="decode plainly")
    parser.add_argument("--temperature", type=float, default=default.temperature, help="0 (default): greedy")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--dtype", default="auto", help=f"auto (default: the device's fastest), {', '.join(DTYPES)}")
    parser.add_argument("--seed", type=int, help="of the sampling (default: another one at every call)")
    parser.add_argument(
        "--verification",
        default=default.verification,
        choices=get_args(Verification),
        help="the accept rule when sampling (default: the drafter's own)",
    )
    parser.add_argument("--compare", action="store_true", help="measure plain decoding and FlashMap side by side")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def generate(args: argparse.Namespace) -> None:
    """Check everything that needs no model, load, check the rest, generate."""
    settings = Settings(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        verification=args.verification,
        seed=random.SystemRandom().randrange(2**32) if args.seed is None else args.seed,
    )
    if args.compare and args.no_drafter:
        raise ValueError("--compare measures a drafter against plain decoding: leave out --no-drafter")
    try:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on stdin is not text in {error.encoding} ({error.reason})") from error
    prompts.check_prompt(prompt)
    device = default_device()
    dtype = choose_dtype(args.dtype, device)
    source = drafter_source(args)
    if source is not None:
        drafters.check(source)
    target, tokenizer = targets.load(args.target, dtype=dtype, device=device)
    drafter = None
    if source is not None:
        drafter = drafters.load(source, dtype=dtype, device=device)
        check_target(drafter.config, target, tokenizer)
        if chat_template_differs(drafter.config, tokenizer):
            print("flashmap: the drafter was trained with another chat template: expect less speed", file=sys.stderr)
    if args.compare and drafter is not None:
        show = None if args.json else show_text(tokenizer)
        comparison = compare(target, tokenizer, drafter, {"prompt": prompt}, settings, show=show)
        if args.json:
            print(json.dumps(comparison.to_dict(), allow_nan=False))
        else:
            print_comparison(comparison)
    else:
        generate_once(target, tokenizer, drafter, prompt, settings, as_json=args.json)


def drafter_source(args: argparse.Namespace) -> str | None:
    """Folder or Hub id of the drafter; None: decode plainly."""
    if args.no_drafter or args.drafter is not None:
        return args.drafter
    try:
        return str(drafters.default_drafter(args.target))
    except ValueError as error:
        raise ValueError(f"{error}, or decode without a drafter: --no-drafter") from error


def generate_once(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: FlashMapDrafter | None,
    prompt: str,
    settings: Settings,
    as_json: bool,
) -> None:
    inputs = prompts.encode(target, tokenizer, prompt)
    prompts.check_length(target, inputs["input_ids"].shape[1], settings.max_new_tokens)
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if drafter is not None:  # what a process measures once is no part of the answer's time; one token is prompt enough
        short = {name: value[:, -1:] for name, value in inputs.items()}
        run(target, short, settings.generation_config(max_new_tokens=1), settings.seed, assistant_model=drafter)
    with record() as stats:
        done = run(
            target, inputs, settings.generation_config(), settings.seed, assistant_model=drafter, streamer=streamer
        )
    if not as_json:
        speed = f"{len(done.tokens)} tokens, {done.tokens_per_second:.1f} tokens/s"
        print(f"flashmap: {speed}, {done.tokens_per_step:.2f} tokens per target step", file=sys.stderr)
        return
    drafted: dict[str, Any] | None = None
    if drafter is not None:
        drafted = dataclasses.asdict(stats) | {"acceptance_by_position": stats.acceptance_by_position}
    answer = {
        "text": tokenizer.decode(done.tokens, skip_special_tokens=True),
        "token_ids": done.tokens,
        "prompt_tokens": inputs["input_ids"].shape[1],
        "settings": dataclasses.asdict(settings),
        "seconds": done.seconds,
        "tokens_per_second": done.tokens_per_second,
        "tokens_per_step": done.tokens_per_step,
        "statistics": drafted,
        "provenance": provenance(),
    }
    print(json.dumps(answer, allow_nan=False))
