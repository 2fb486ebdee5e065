"""The command `mjp check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from mjp_privacy.core.command import DONE, SOME_FAILED, Usage, check_idle, print_json
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import size_of


@dataclass(frozen=True)
class CheckArguments:
    """Say which attacks apply to recorded uploads and what is wrong with them, or which apply to a
    model, before anything is computed: mjp check --model vit_tiny_patch16_224 --img-size 192."""

    folder: tyro.conf.Positional[Path | None] = None
    """The folder: NAME.safetensors and NAME.json for each upload, and weights/ beside them."""
    model: str | None = None
    """In place of a folder: a model's name, or a file of weights, of which only the header is
    read."""
    img_size: str | None = None
    """The model's input size, a side such as 192 or height and width such as 96x64, in place of
    its own."""
    batch: int = 1
    """Images in each of the client's steps."""
    withhold: tuple[str, ...] = ()
    """Parameters whose gradient the client keeps, such as pos_embed."""
    mjp: bool = False
    """Ask about an MJP client, also of a model that has no unknown embedding."""

    json: bool = False
    """Print the answer as JSON for programs (docs/json.md)."""


def check(argv: list[str], usage: Usage) -> int:
    """`mjp check`: print a report on a folder of recorded uploads, or on a model."""
    arguments = usage.parse(CheckArguments, argv)
    folder, model = arguments.folder, arguments.model
    if (folder is None) == (model is None):
        raise UserError(
            "mjp check: expected a folder of recorded uploads or --model NAME|FILE, got "
            f"{'none of them' if folder is None else 'both'}. Give one of the two."
        )
    asked = {n: getattr(arguments, n) for n in ("img_size", "batch", "withhold", "mjp")}
    if model is None:
        check_idle(arguments, asked, "the headers of a folder of uploads state it")
    from mjp_privacy.uploads.check import check_model, check_uploads

    checked = None if folder is None else check_uploads(folder)
    asked["img_size"] = size_of(asked["img_size"])
    answer = checked or check_model(str(model), **asked)
    if arguments.json:
        print_json("check" if checked else "check-model", answer)
    else:
        print(answer.text())
    return DONE if checked is None or checked.usable else SOME_FAILED
