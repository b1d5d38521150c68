"""The command line's options: python -m runtime_py generate|chat|serve|check|bench|eval|info BUNDLE [...]"""

import argparse
from collections.abc import Callable
from pathlib import Path

THREADS_HELP = "default: one per physical core, without the slowest class"
CONTEXT_HELP = "most tokens of a text; default: the bundle's"


class _Parser(argparse.ArgumentParser):
    """Options have no short forms: one that is new could change what they mean."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, allow_abbrev=False, **settings)

    def error(self, message: str) -> None:
        raise ValueError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="python -m runtime_py", description="Run a bundle written by python -m export")
    commands = top.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="continue a prompt or answer a message")
    generate.add_argument("bundle", type=Path)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="raw text; bos is put in front")
    prompt.add_argument("--prompt-ids", metavar="2,10,..", help="token ids, taken as they are")
    prompt.add_argument("--chat", metavar="TEXT", help="a user's message, through the chat template")
    generate.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    _add_drafts_and_backend(generate)
    _add_sampling(generate)
    generate.add_argument("--json", action="store_true", help="one JSON object on stdout instead of streamed text")
    chat = commands.add_parser("chat", help="a conversation, line by line from stdin")
    chat.add_argument("bundle", type=Path)
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    chat.add_argument("--think", action="store_true", help="template variable enable_thinking")
    chat.add_argument("--max-new-tokens", type=int, metavar="N", help="of a reply; default: what the context holds")
    _add_drafts_and_backend(chat)
    _add_sampling(chat)
    serve = commands.add_parser("serve", help="OpenAI's HTTP API")
    serve.add_argument("bundle", type=Path)
    serve.add_argument("--host", default="127.0.0.1", help="default: this machine alone")
    serve.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    _add_drafts_and_backend(serve)
    check = commands.add_parser("check", help="what drafting costs on this machine, and whether it pays")
    check.add_argument("bundle", type=Path)
    _add_machine(check)
    check.add_argument("--json", action="store_true", help="one JSON object on stdout")
    check.set_defaults(draft_tokens=None, schedule=None, drafter="mtp")
    bench = commands.add_parser("bench", help="how fast it is with each number of drafts")
    bench.add_argument("bundle", type=Path)
    bench.add_argument("--prompts", type=Path, metavar="FILE", help='lines of {"kind": "..", "text": ".."}')
    bench.add_argument("--draft-tokens", type=_modes, default="0,1,2,4,auto", metavar="0,..,auto", dest="modes")
    bench.add_argument("--tokens", type=int, default=64, metavar="N", help="of a reply")
    bench.add_argument("--repeats", type=int, default=3, metavar="N", help="of all prompts with all numbers of drafts")
    bench.add_argument("--drafter", choices=("auto", "mtp", "ngram"), default="auto", help="who drafts; see README")
    _add_machine(bench, _auto_or_number, f"or auto, which measures them; {THREADS_HELP}")
    bench.add_argument("--html", type=Path, metavar="FILE", help="a report with plots, in one file")
    bench.add_argument("--json", action="store_true", help="one JSON object on stdout instead of tables")
    bench.set_defaults(draft_tokens=None, schedule=None)
    evaluate = commands.add_parser("eval", help="how good it is on a text, alone or against another bundle")
    evaluate.add_argument("bundle", type=Path)
    evaluate.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8")
    evaluate.add_argument("--against", type=Path, metavar="BUNDLE", help="the reference, of the same checkpoint")
    evaluate.add_argument(
        "--against-backend",
        choices=("auto", "onnx", "executorch"),
        help="default: the bundle's, else what the reference holds",
    )
    evaluate.add_argument("--tokens", type=int, metavar="N", help="most tokens of the text; default: all")
    evaluate.add_argument(
        "--draft-tokens",
        type=int,
        metavar="K",
        help="of a block; default: the drafter's own; 0: drafts are not measured",
    )
    _add_machine(evaluate, context="tokens of a window, its bos included; default: 512, or what the bundles take")
    evaluate.add_argument("--json", action="store_true", help="one JSON object on stdout")
    evaluate.set_defaults(schedule=None, drafter="mtp")
    info = commands.add_parser("info", help="what a bundle holds")
    info.add_argument("bundle", type=Path)
    return top


def _add_drafts_and_backend(command: argparse.ArgumentParser) -> None:
    from .costs import MAX_DRAFT_TOKENS

    command.add_argument(
        "--draft-tokens",
        type=_auto_or_number,
        metavar="K",
        help=f"0 (plain) to {MAX_DRAFT_TOKENS}, or auto, the default: what is measured to be fastest",
    )
    command.add_argument("--schedule", choices=("constant", "heuristic"), help="of a number of drafts; see README")
    command.add_argument("--drafter", choices=("auto", "mtp", "ngram"), default="auto", help="who drafts; see README")
    _add_machine(command)


def _add_machine(
    command: argparse.ArgumentParser, threads: Callable = int, help: str = THREADS_HELP, context: str = CONTEXT_HELP
) -> None:
    command.add_argument(
        "--backend", choices=("auto", "onnx", "executorch"), default="auto", help="auto: executorch, else onnx"
    )
    command.add_argument("--threads", type=threads, metavar="N", help=help)
    command.add_argument("--context", type=int, metavar="N", help=context)
    command.add_argument("--force", action="store_true", help="also where memory does not seem to suffice")


def _add_sampling(command: argparse.ArgumentParser) -> None:
    for name, kind, text in (
        ("temperature", float, "0 is greedy"),
        ("top-k", int, "0 keeps every token"),
        ("top-p", float, "1 keeps every token"),
        ("min-p", float, "0, the default, keeps every token"),
        ("repetition-penalty", float, "1, the default, is none"),
        ("seed", int, "default: drawn, and reported"),
    ):
        command.add_argument(f"--{name}", type=kind, metavar="X", help=text)


def _auto_or_number(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number") from None


def _modes(text: str) -> list[int | str]:
    modes = [_auto_or_number(part) for part in text.split(",")]
    if len(set(modes)) < len(modes):
        raise argparse.ArgumentTypeError(f"{text!r} has a number twice")
    return modes
