"""`bsfg completion`: write the script by which a shell completes our commands."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from bsfg.cli.output import examples

app = typer.Typer()

PROGRAM = "bsfg"

EPILOG = examples(
    ('eval "$(bsfg completion bash)"', "in this shell; put the line into ~/.bashrc for all to come"),
    ("bsfg completion zsh > ~/.zfunc/_bsfg", "for zsh, from a folder of its fpath"),
    ("bsfg completion fish > ~/.config/fish/completions/bsfg.fish", "for fish"),
    ("bsfg completion bash > /usr/share/bash-completion/completions/bsfg", "for everybody on this machine"),
)


class Shell(StrEnum):
    """The shells that can be taught."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


@app.command(epilog=EPILOG)
def completion(shell: Annotated[Shell, typer.Argument(help="Which shell.")]) -> None:
    """Write a shell's completion script to stdout: commands, options, and the names in the zone's file.

    Links, streams, consumers and identities are completed from the file of --config, of BSFG_CONFIG, or from zone.toml
    in the current folder; no node is asked.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(prog_name=PROGRAM, complete_var=f"_{PROGRAM.upper()}_COMPLETE", shell=shell.value)
    print(script)
