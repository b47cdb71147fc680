"""`strata completion`: shell completion of commands, options and files, from the parser itself."""

from __future__ import annotations

import argparse
from argparse import Namespace

from strata.cli.parser import make_parser


def completion(options: Namespace) -> None:
    """Print the script; `source <(strata completion bash)` turns it on."""
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](words_of(make_parser())))


def words_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """What may follow each command; "" is the bare command line."""
    found = {"": [s for a in parser._actions for s in a.option_strings if s.startswith("--")]}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found[""] += list(action.choices)
            for name, sub in action.choices.items():
                found[name] = words_of(sub)[""]
    return found


def _bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f"    {name}) words='{' '.join(found)}';;" for name, found in words.items() if name)
    return f"""_strata() {{
  local words='{" ".join(words[""])}' current="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -gt 1 ]; then case "${{COMP_WORDS[1]}}" in
{cases}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _strata strata"""


def _zsh(words: dict[str, list[str]]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(words)


def _fish(words: dict[str, list[str]]) -> str:
    first = [w for w in words[""] if not w.startswith("-")]
    lines = [f"complete -c strata -n __fish_use_subcommand -a '{' '.join(first)}'"]
    for name, found in words.items():
        for word in found if name else ():
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c strata -n '__fish_seen_subcommand_from {name}' {kind}")
    return "\n".join(lines)
