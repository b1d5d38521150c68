"""Command line: python -m runtime_py generate|chat|serve|check|bench|eval|info BUNDLE [...]

The other modules are imported within functions, so that an interrupt while they load ends without a traceback.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable

from .options import parser
from .progress import say

TEMPLATE_TOKENS = 256  # room for what a template writes around a message
MOST_ERROR = 1000  # characters


def main(arguments: list[str]) -> int:
    try:
        options, unknown = parser().parse_known_args(arguments)
        if unknown:
            raise ValueError(
                f"unrecognized arguments: {' '.join(unknown)}; see python -m runtime_py {options.command} --help"
            )
        commands = {"generate": _generate, "chat": _chat, "serve": _serve, "check": _check, "bench": _bench}
        code = {**commands, "eval": _eval, "info": _info}[options.command](options)
        print(end="", flush=True)  # now, so that an error of the write is met below
        return code or 0
    except BrokenPipeError:  # the reader of stdout has gone
        _drop_unwritten()
        return 0
    except (ValueError, OSError) as error:
        told = _one_line(error)
    except MemoryError as error:  # forced, or asked for by a manifest that says more than its files hold
        told = (
            f"out of memory ({_one_line(error) or 'no reason given'}); give a smaller --context or close other programs"
        )
    print(f"error: {told}", file=sys.stderr)
    _drop_unwritten()
    return 2


def _drop_unwritten() -> None:
    """What stdout does not take would fail once more, with a traceback, when the interpreter exits."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(message: object) -> str:
    """The names of files may hold line breaks, and a number thousands of digits."""
    line = " ".join(str(message).splitlines())
    return line if len(line) <= MOST_ERROR else f"{line[: MOST_ERROR // 2]} ... {line[-MOST_ERROR // 2 :]}"


def _generate(options: argparse.Namespace) -> None:
    from .events import TextDelta
    from .measure import report
    from .session import Session, Settings

    sampling = _sampling(options)
    prompt = options.prompt if options.prompt_ids is None else _parse_ids(options.prompt_ids)
    longest = _most_tokens(options.chat if prompt is None else prompt) + options.max_new_tokens
    pair = _load(options, longest, 0)
    session = Session(pair, options.context, margin_rows=0)
    if prompt is None:
        prompt = _chat_ids(pair, options.chat)
    for event in session.stream(prompt, Settings(options.max_new_tokens, sampling)):
        if isinstance(event, TextDelta) and not options.json:
            print(event.text, end="", flush=True)
    result = report(session, event)
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        print()
        print(_summary(result), file=sys.stderr)


def _chat(options: argparse.Namespace) -> int:
    """-> 2 if lines that no terminal wrote met an error; at a terminal somebody has read it and gone on."""
    from .chat import Chat, run
    from .session import MARGIN_ROWS, Session, Settings

    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {options.max_new_tokens}; it must be at least 1")
    _sampling(options)  # a wrong option ends the program before it loads
    session = Session(_load(options, None, MARGIN_ROWS), options.context)
    session.pair.text.render_chat([{"role": "user", "content": "a"}])  # as does a bundle without a template
    if sys.stdin.isatty() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings = lambda: Settings(options.max_new_tokens, _sampling(options))  # noqa: E731  a seed for each reply
    failed = run(Chat(session, settings, options.system, options.think, options.drafter))
    return 2 if failed and not sys.stdin.isatty() else 0


def _serve(options: argparse.Namespace) -> None:
    from .session import MARGIN_ROWS, Session

    try:
        from .serve import run
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; serve needs pip install -e '.[serve]'") from None
    if not 0 <= options.port < 1 << 16:
        raise ValueError(f"--port {options.port} is outside 0..65535")
    run(Session(_load(options, None, MARGIN_ROWS), options.context), options.host, options.port)


def _check(options: argparse.Namespace) -> None:
    from .probe import CONTEXT_TOKENS, as_json, lines, probe

    pair = _load(options, CONTEXT_TOKENS, 0)
    result = as_json(probe(pair.target, pair.drafter, options.context), pair.off_reason)
    result = {"bundle": pair.manifest.name, "backend": pair.backend, "threads": options.threads, **result}
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    print(f"{result['bundle']} on {result['backend']}, threads: {result['threads']}")
    print("\n".join(lines(result)))


def _bench(options: argparse.Namespace) -> None:
    from . import bench_report
    from .bench import GraphTimer, Plan, measure
    from .bench_prompts import PROMPTS, read_prompts

    prompts = read_prompts(options.prompts) if options.prompts else PROMPTS
    _check_bench(options)
    longest = max(_most_tokens(prompt.text) for prompt in prompts) + options.tokens
    thread_candidates = _time_threads(options, longest) if options.threads == "auto" else []
    options.draft_tokens = 0 if options.modes == [0] else None  # the drafter need not load
    timer = GraphTimer()
    pair = _load(options, longest, 0, timer.wrap)
    plan = Plan(prompts, tuple(options.modes), options.repeats, options.tokens, options.drafter, options.context)
    result = measure(pair, timer, plan, options.threads, thread_candidates, say)
    print(json.dumps(result, ensure_ascii=False) if options.json else bench_report.text(result), flush=True)
    if options.html:  # last: what took minutes to measure is told, even if this file cannot be written
        options.html.write_text(bench_report.html(result), encoding="utf-8")


def _eval(options: argparse.Namespace) -> None:
    from . import evaluate
    from .comparable import choose_plan
    from .memory import available_bytes, check_fits, together

    if options.tokens is not None and options.tokens < 1:
        raise ValueError(f"--tokens {options.tokens} is below 1; leave it out for the whole text")
    text = evaluate.read_text(options.text)
    backends = options.backend, options.against_backend
    plan = choose_plan(options.bundle, options.against, *backends, options.context, options.draft_tokens)
    for name in ("context", "draft_tokens"):
        setattr(options, name, getattr(plan, name))
    both = [
        argparse.Namespace(**{**vars(options), "bundle": bundle, "backend": backend})
        for bundle, backend in zip(plan.bundles, plan.backends, strict=True)
    ]
    need = together([_needs(one, plan.context, 0, plan.draft_tokens != 0) for one in both])
    if not options.force:
        check_fits(need, available_bytes())
    pairs = [(one.bundle, _load(one, plan.context, 0)) for one in both]
    result = evaluate.run(pairs, text, options.tokens, plan)
    told = evaluate.as_json(result, options.text, both[0].threads)
    print(json.dumps(told, ensure_ascii=False) if options.json else "\n".join(evaluate.lines(told)))


def _check_bench(options: argparse.Namespace) -> None:
    """ValueError before minutes are spent."""
    from .bench_report import require_matplotlib

    for mode in options.modes:
        if mode != "auto":
            _check_count(mode)
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens} is below 2; the first of a reply counts as prefill")
    if options.repeats < 1:
        raise ValueError(f"--repeats {options.repeats} is below 1; 3 or more show a spread")
    if options.html:
        require_matplotlib()
        if not options.html.absolute().parent.is_dir() or options.html.is_dir():
            raise ValueError(f"--html {options.html}: no file can be made there; give one in a folder that exists")


def _time_threads(options: argparse.Namespace, longest: int) -> list[dict]:
    """What each number of threads costs; the fastest becomes the option's."""
    from . import bench_threads
    from .cpus import physical_cores

    _check_memory(options, longest, 0, True)
    counts = bench_threads.candidates(physical_cores())
    timed = bench_threads.time_threads(options.bundle, options.backend, counts, say)
    options.threads = bench_threads.fastest(timed)
    return timed


def _sampling(options: argparse.Namespace):
    """-> sampling.Sampling"""
    from .manifest import load
    from .sampling import choose_sampling

    return choose_sampling(
        load(options.bundle).sampling,
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        options.repetition_penalty,
        options.seed,
    )


def _load(options: argparse.Namespace, asked_tokens: int | None, margin_rows: int, wrap: Callable | None = None):
    """-> loading.Pair; one warning if drafts were asked for and cannot be. asked_tokens: of the longest text, None for a
    full context; with margin_rows, as for a session, they say how much memory its rows need. wrap: as graph.Wrap."""
    from .graph import unwrapped
    from .loading import load

    draft_tokens = _checked_draft_tokens(options)
    options.threads = _checked_threads(options.threads)
    _check_memory(options, asked_tokens, margin_rows, draft_tokens != 0 and options.drafter != "ngram")
    drafts = (draft_tokens, options.schedule, options.backend, options.drafter)
    pair = load(options.bundle, options.threads, *drafts, wrap or unwrapped)
    if pair.manifest.warning:
        print(f"warning: {pair.manifest.warning}", file=sys.stderr)
    if pair.off_reason and draft_tokens != 0:
        print(f"warning: drafting is off: {_one_line(pair.off_reason)}", file=sys.stderr)
    return pair


def _checked_threads(threads: int | None) -> int:
    from .cpus import MAX_THREADS, default_threads

    if threads is None:
        return default_threads()
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"--threads {threads} is outside 1..{MAX_THREADS}; give at most one per core")
    return threads


def _check_memory(options: argparse.Namespace, asked_tokens: int | None, margin_rows: int, drafts: bool) -> None:
    """ValueError if memory does not suffice and nothing is forced, or as _needs."""
    from .memory import available_bytes, check_fits

    need = _needs(options, asked_tokens, margin_rows, drafts)
    if not options.force:
        check_fits(need, available_bytes())


def _needs(options: argparse.Namespace, asked_tokens: int | None, margin_rows: int, drafts: bool):
    """-> memory.Needs; ValueError if --context is more than the bundle takes."""
    from . import manifest as contract
    from .loading import choose_backend
    from .memory import needs

    manifest = contract.load(options.bundle)
    backend = choose_backend(manifest, options.backend)
    most = manifest.backends[backend].max_context_tokens
    if options.context is not None and not 1 <= options.context <= most:
        raise ValueError(f"--context {options.context} is outside 1..{most}, what the bundle's {backend} graphs take")
    context = options.context or most
    return needs(manifest, backend, min(context, asked_tokens or context), margin_rows, drafts)


def _most_tokens(prompt: str | list[int]) -> int:
    """No token of a text stands for less than a byte."""
    return len(prompt) if isinstance(prompt, list) else len(prompt.encode(errors="replace")) + TEMPLATE_TOKENS


def _checked_draft_tokens(options: argparse.Namespace) -> int | None:
    """None: chosen while running, or the drafter's own number where there is a schedule."""
    count = options.draft_tokens
    if count == "auto":
        if options.schedule:
            raise ValueError(f"--schedule {options.schedule} needs a number of --draft-tokens; auto has no schedule")
        return None
    if count is not None:
        _check_count(count)
    return count


def _check_count(count: int) -> None:
    from .costs import MAX_DRAFT_TOKENS

    if not 0 <= count <= MAX_DRAFT_TOKENS:
        raise ValueError(f"--draft-tokens {count} is outside 0..{MAX_DRAFT_TOKENS}; 0 decodes without drafts")


def _chat_ids(pair, message: str) -> list[int]:
    if not message:
        raise ValueError("the message is empty; give at least one character")
    return pair.text.encode_chat([{"role": "user", "content": message}])


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--prompt-ids {text!r} is no list of token ids; write integers like 2,10,20") from None


def _summary(result: dict) -> str:
    timings, draft = result["timings"], result["draft"]
    rate, count = timings["decode_tokens_per_second"], len(result["token_ids"])
    counted = f"{count} token{'' if count == 1 else 's'}" + (f", {rate:.1f} tokens/s" if rate else "")
    share = draft["accepted"] / draft["drafted"] if draft["drafted"] else 0
    parts = [f"{draft['accepted']} of {draft['drafted']} accepted ({share:.0%})"] if draft["drafted"] else []
    parts += [f"off ({draft['off_reason']})"] if draft["off_reason"] else []
    seed = result["sampling"]["seed"]
    return (
        f"[{counted}, first after {timings['time_to_first_token_s']:.3f} s, "
        f"stop: {result['stop_reason']}, {result['backend']}, {'greedy' if seed is None else f'seed {seed}'}, "
        f"drafts: {', now '.join(parts) or 'none'}, peak {result['memory']['peak_rss_mib']:.0f} MiB]"
    )


def _info(options: argparse.Namespace) -> None:
    from .info import print_info

    print_info(options.bundle)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the caller ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once, also within an import or a long call
    if sys.stdout:  # None where the caller closed it
        sys.stdout.reconfigure(encoding="utf-8")  # JSON and text, whatever the locale
    sys.exit(main(sys.argv[1:]))
