"""The entry point: commands, and what becomes of errors and signals.

Exit codes: 0 done; 1 a bug (with its traceback), or a doctor's finding; 2 something for the user
to change, said in one line; 128 + n stopped by signal n (130 Ctrl-C, 141 a closed pipe, 143
terminated).
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from offload.cli import (
    bench,
    chat,
    doctor,
    finetune,
    generate,
    pack,
    plan,
    probe,
    serve,
    simulate,
    synth,
)
from offload.cli.limits import and_files, limit_reached, path_refused
from offload.cli.once import once
from offload.cli.signals import Interrupted, heard, signals_raise
from offload.cli.streams import drop_output, standard_streams
from offload.errors import OffloadError
from offload.version import __version__

USER_ERROR = 2
MOST_CHARACTERS = 4000
"""Of an error: some repeat whole flags, templates and lists of a config."""

# typer has carried its own copy of click since 0.26: the public class leads to whichever it is.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

# Plain help: drawing it with rich takes longer than all the rest of --help.
app = typer.Typer(
    name="offload",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offload {__version__}")
        raise typer.Exit


@app.callback()
def _offload(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run PyTorch models that are larger than memory: weights stream from the disk."""


MANY_PROMPTS = "for several prompts give --batch a file with one to a line"
app.command(
    "generate",
    short_help="Generate text.",
    cls=once(
        prompt=MANY_PROMPTS,
        prompt_file=MANY_PROMPTS,
        prompt_ids=MANY_PROMPTS,
        batch="put the lines of all files into one",
    ),
)(generate.generate)
app.command("chat", short_help="Talk to a model.")(chat.chat)
app.command("serve", short_help="Answer OpenAI's clients over HTTP.")(serve.serve)
app.command(
    "finetune",
    short_help="Train a model, in full or with adapters.",
    cls=once(
        data="put the rows of all files into one, or into a directory that 'datasets' saved",
        eval_data="put the rows of all files into one",
    ),
)(finetune.finetune)
app.command("plan", short_help="Show what would live where, and how fast it would be.")(plan.plan)
app.command("simulate", short_help="Predict a model's speed from its config alone.")(
    simulate.simulate
)
app.command("probe", short_help="Measure the disk, the memory and the CPU.")(probe.probe)
app.command("doctor", short_help="Check this machine; say what is missing.")(doctor.doctor)
app.add_typer(bench.app, name="bench", short_help="Replay a recorded routing.")
app.command("pack", short_help="Quantise a model, and lay it out for fast reading.")(pack.pack)
app.command("synth", short_help="Write a random checkpoint of any model.")(synth.synth)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    Args:
        argv: the words after the program's name; default: ``sys.argv[1:]``.
    """
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    command = typer.main.get_command(app)
    with standard_streams(), signals_raise():
        try:
            # Not command.main(): it answers signals and closed pipes in its own way, too early.
            with command.make_context("offload", args) as context:
                command.invoke(context)
            sys.stdout.flush()
        except typer.Exit as end:
            return end.exit_code
        except OffloadError as error:
            return _fail(f"{error}{and_files(error)}")
        except _UsageError as error:
            return _fail(f"{_usage(error)}{_hint(error)}")
        except Interrupted as stop:
            heard()
            _say("interrupted" if stop.signum == signal.SIGINT else "terminated")
            return 128 + stop.signum
        except BrokenPipeError:
            # Whoever read our output has gone, and Python would complain when it flushes at exit.
            drop_output(sys.stdout)
            return 128 + signal.SIGPIPE
        except (MemoryError, RuntimeError, OSError) as error:
            refused = limit_reached(error) or path_refused(error, args)
            if refused is None:
                raise
            return _fail(refused)
    return 0


def _fail(message: str) -> int:
    # One line whatever a library's message looks like: scripts read the last line of stderr.
    line = " ".join(message.split())
    if len(line) > MOST_CHARACTERS:  # the way out stands at its end
        line = f"{line[: MOST_CHARACTERS // 2]} … {line[-MOST_CHARACTERS // 2 :]}"
    _say("error: " + _printable(line))
    return USER_ERROR


def _printable(message: str) -> str:
    """``message`` with escapes for what a terminal would obey: names in it come from files."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in message
    )


def _usage(error: BaseException) -> str:
    formatted = getattr(error, "format_message", None)
    return str(formatted() if formatted is not None else error).rstrip(".")


def _hint(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    return f" (see '{context.command_path} --help')" if context is not None else ""


def _say(line: str) -> None:
    with contextlib.suppress(OffloadError):  # which may be what is to be said
        sys.stdout.flush()
    typer.echo(line, err=True)


if __name__ == "__main__":
    sys.exit(main())
