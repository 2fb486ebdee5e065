"""`mjp COMMAND`: the table of all commands; a command's code is imported when it is called."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mjp_privacy.core.command import ANEW, BAD_USAGE, DONE, GOES_ON, Usage, answered
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import one_thread_environment
from mjp_privacy.core.registry import Entry, did_you_mean
from mjp_privacy.core.text import shown


@dataclass(frozen=True)
class CommandEntry(Entry):
    """A command: its line in `mjp --help`, and the example that its own help starts with."""

    example: str = ""  # without the leading `mjp`
    again: str = ANEW  # what the same command does after it was stopped
    one_thread: bool = False  # whether each of its processes computes with one thread


COMMANDS: Mapping[str, CommandEntry] = {
    "demo": CommandEntry(
        "mjp_privacy.report.commands:demo",
        "attack small models on shipped photographs and make the page",
        example="demo",
        again=GOES_ON,
        one_thread=True,
    ),
    "attack": CommandEntry(
        "mjp_privacy.report.commands:attack",
        "attack a folder of images, or recorded uploads, as a config says",
        example="attack configs/demo.yaml --out results/demo",
        again=GOES_ON,
        one_thread=True,
    ),
    "report": CommandEntry(
        "mjp_privacy.report.commands:report",
        "tables and pictures of one or more attacked runs",
        example="report results/demo --out results/demo/report",
    ),
    "score": CommandEntry(
        "mjp_privacy.metrics.commands:score",
        "score any two folders of images: MSE, PSNR, SSIM, FFT2D, LPIPS",
        example="score --reference photos --reconstruction leaked --out scores.csv",
    ),
    "sample": CommandEntry(
        "mjp_privacy.training.commands:sample",
        "copy a few images of every class, with labels and hashes, or corrupt them",
        example="sample --from IMAGENET_VAL --out sample_1k --per-class 1",
    ),
    "train": CommandEntry(
        "mjp_privacy.training.commands:train",
        "train a network with or without MJP (also under torchrun)",
        example="train configs/training/cifar10.yaml --row J --data cifar10-train.zip --out runs/J",
        again=GOES_ON,
    ),
    "evaluate": CommandEntry(
        "mjp_privacy.training.commands:evaluate",
        "accuracy, consistency and robustness of trained models",
        example="evaluate --checkpoint cifar_vit cifar_vit_mjp --data cifar10-test.zip --gamma .27",
    ),
    "curves": CommandEntry(
        "mjp_privacy.training.commands:curves",
        "loss and accuracy of several trainings in one picture",
        example="curves results/A results/J --out results/curves",
    ),
    "analyse": CommandEntry(
        "mjp_privacy.training.commands:analyse",
        "what the position embeddings of models hold, and what MJP changes",
        example="analyse cifar_vit cifar_vit_mjp --out results/positions",
    ),
    "federate": CommandEntry(
        "mjp_privacy.federation.commands:federate",
        "train a federation and attack what its clients send",
        example="federate configs/federated/minute.yaml --data embedded --out results/minute",
        again=GOES_ON,
    ),
    "compare": CommandEntry(
        "mjp_privacy.federation.commands:compare",
        "accuracy against leakage of several federations",
        example="compare results/plain results/mjp --out results/comparison",
    ),
    "check": CommandEntry(
        "mjp_privacy.uploads.commands:check",
        "which attacks apply to recorded uploads, or to a model, and why others do not",
        example="check results/minute/uploads",
    ),
    "fit-prior": CommandEntry(
        "attacks.prior:fit",
        "fit the attacks' picture prior to another patch size",
        example="fit-prior --images photos --patch 8 --out mine.safetensors",
    ),
    "list": CommandEntry(
        "mjp_privacy.federation.commands:list_names",
        "models, attacks, defences, metrics, engines and configs by name",
        example="list attacks",
    ),
    "completion": CommandEntry(
        "mjp_privacy.cli:completion",
        "a script with which the Tab key completes all of this",
        example="completion bash",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: main(["list", "attacks"])."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return DONE if arguments else BAD_USAGE
    name, *rest = arguments
    if name == "--version":
        from mjp_privacy import __version__

        print(f"mjp-privacy {__version__}")
        return DONE
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        print(f"error: mjp has no command {name!r}.{hint} See mjp --help.", file=sys.stderr)
        return BAD_USAGE
    command = COMMANDS[name]
    if command.one_thread and "torch" not in sys.modules:
        os.environ.update(one_thread_environment())
    usage = Usage(f"mjp {name}", f"mjp {command.example}", command.again)
    return answered(command.load, rest, usage)


def overview() -> str:
    """The text that `mjp --help` prints: commands, a first example and exit codes."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "What a Vision Transformer client leaks through its gradients, with and without MJP.",
            "",
            "To begin with (nothing to download, 90 seconds): mjp demo",
            "",
            "Commands (mjp COMMAND --help says more):",
            *lines,
            "",
            "Exit codes: 0 done, 2 a mistake in the command, 3 some image or cell failed, 70 a",
            "fault of mjp-privacy, 71 no memory, 74 no disk to write to, 130 Ctrl-C, 143 SIGTERM,",
            "129 SIGHUP.",
        ]
    )


# the Tab key --------------------------------------------------------------------------------------

SCRIPT = """\
_mjp() {{
  local words at=${{COMP_WORDS[COMP_CWORD]}}
  [ "$COMP_CWORD" = 1 ] && words="{commands}" || case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$at") $(compgen -f -- "$at"))
}}
complete -o filenames -F _mjp mjp
"""
FOR_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")


def completion(argv: list[str], usage: Usage) -> int:
    """Print a script of each command's options, as its --help lists them, and of names."""
    if argv in (["-h"], ["--help"]):
        print(f"usage: {usage.prog} bash|zsh\n\nExample: {usage.example}\n")
        print(
            "Keep what it prints in ~/.local/share/bash-completion/completions/mjp, or source it."
        )
        return DONE
    if argv not in (["bash"], ["zsh"]):
        raise UserError(f"{usage.prog}: expected bash or zsh, got {shown(' '.join(argv))!r}.")
    from mjp_privacy.core.read import STOCK
    from mjp_privacy.federation.commands import NAMES

    names = {"attack": sorted(file.stem for file in STOCK.glob("*.yaml")), "list": list(NAMES)}
    cases = []
    for name in COMMANDS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([name, "--help"])
        words = [*sorted({*OPTION.findall(said.getvalue())}), *names.get(name, [])]
        cases.append(f'    {name}) words="{" ".join(words)}" ;;')
    script = SCRIPT.format(commands=" ".join(COMMANDS), cases="\n".join(cases))
    print((FOR_ZSH if argv == ["zsh"] else "") + script, end="")
    return DONE
