"""`strata manual`: the manual page in roff, from the parser itself; wheels install it for `man strata`."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator

from strata.cli.parser import make_parser


def manual(options: Namespace) -> None:
    """Print the page; `strata manual > strata.1 && man ./strata.1` reads it."""
    print(page(), end="")


def page() -> str:
    """The manual page."""
    parser = make_parser()
    lines = [
        '.TH STRATA 1 "" "strata" "User Commands"', ".SH NAME", r"strata \- compile and run tensor programs and models",
        ".SH SYNOPSIS", r".B strata", r".I COMMAND", r"[\fIOPTION\fR]...", ".SH DESCRIPTION",
        ("An ML compiler and runtime: models (ONNX, GGUF, safetensors) and tensor programs become native code. "
        "Every stage can be printed, and every decision explained."), ".SH COMMANDS",
    ]  # fmt: skip
    for name, sub, about in commands(parser):
        lines += [f'.SS "{_plain(_usage(sub, name))}"', _plain(about[0].upper() + about[1:]) + "."]
        for action in sub._actions:
            if action.dest == "help" or action.help is argparse.SUPPRESS:
                continue
            if isinstance(action, argparse._SubParsersAction):
                for choice in action._choices_actions:
                    lines += [".TP", rf"\fB{_plain(choice.dest)}\fR", _plain(choice.help or "")]
                continue
            lines += [".TP", _flags(action), _plain(action.help or "")]
    lines += [
        ".SH EXIT STATUS", "0 success, 1 a check that failed, 2 a mistake, which is told in one line.",
        ".SH ENVIRONMENT",
        (r"STRATA_* set what strata.Config has: STRATA_CACHE_DIR, STRATA_NUM_THREADS and others; "
        r"\fBstrata doctor\fR shows them."),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Each command with its parser and what it is for."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {a.dest: a.help or "" for a in action._choices_actions}
            for name, sub in action.choices.items():
                yield name, sub, about.get(name, "")


def _usage(sub: argparse.ArgumentParser, name: str) -> str:
    words = [_operand(a) for a in sub._actions if not a.option_strings]
    return " ".join(["strata", name, *words])


def _operand(action: argparse.Action) -> str:
    shown = action.metavar or (" | ".join(map(str, action.choices)) if action.choices else action.dest)
    word = shown if isinstance(shown, str) else " ".join(shown)
    return {"?": f"[{word}]", "*": f"[{word}...]", "+": f"{word}..."}.get(str(action.nargs), word)


def _flags(action: argparse.Action) -> str:
    names = ", ".join(rf"\fB{_plain(flag)}\fR" for flag in action.option_strings)
    if not names:
        return rf"\fI{_plain(_operand(action))}\fR"
    return names if action.nargs == 0 else rf"{names} \fI{_plain(_value(action))}\fR"


def _value(action: argparse.Action) -> str:
    shown = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    word = shown if isinstance(shown, str) else " ".join(shown)
    return f"[{word}]" if action.nargs == "?" else word


def _plain(text: str) -> str:
    """Text that roff takes literally."""
    made = text.replace("\\", r"\e").replace("-", r"\-").replace("%%", "%")
    return "\\&" + made if made.startswith((".", "'")) else made
