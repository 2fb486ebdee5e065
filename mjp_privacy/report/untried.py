"""What a report did not try on its main client: attacks that apply to it, and other circumstances.

Whether an attack applies is asked of the attack itself (`experiment/plan.py`), with an outline
of the client's network that its sizes in the stored facts describe: weights are not at hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from attacks import ATTACKS, find_attack, lacks_parts, traits_of
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.config import AttackConfig, Cell
from mjp_privacy.interfaces import Control
from mjp_privacy.report.clients import Client
from mjp_privacy.report.flags import some_unshuffled
from mjp_privacy.report.lines import failed_images, late_images

SIZES = re.compile(
    r"(?P<kind>\w+) d(?P<width>\d+)(?: l(?P<depth>\d+) h(?P<heads>\d+))? p(?P<patch>\d+)@\S+"
    r"(?P<table>, no position table)?.*"
)
"""How a model's card writes the network that was attacked: `vit d192 l12 h3 p16@224`."""

OTHERS = re.compile("(?P<family>swin|resnet)", re.IGNORECASE)
"""How the cards of networks begin that are no ViTs."""

UNKNOWN_DEPTH = 12
"""Blocks of a network whose card does not state them; no attack looks at more."""


def not_tried(clients: Sequence[Client], client: Client) -> tuple[str, ...]:
    """What this report did not try on its main client, in a few words; `clients`: all of them.

    An attack was tried if it was run in the client's own setting and precision, and neither failed
    nor ran out of its time on every picture.
    """
    lines = [line for line in client.attacks if len(line.images)]
    cut = {x.number: len(failed_images(x) | late_images(x)) == len(x.images) for x in lines}
    ran = {line.cell.known_as for line in lines if not cut[line.number]}
    in_vain = {line.cell.known_as for line in lines} - ran
    missing = [name for name in applicable(client) if name not in ran | in_vain]
    cells = [other.cell for other in clients]
    shas = {cell.checkpoint_sha for cell in cells if cell.gamma == client.cell.gamma}
    items = {
        f"attacks on this client: {', '.join(missing)}": bool(missing),
        f"failed or ran out of time on every picture: {', '.join(sorted(in_vain))}": bool(in_vain),
        "batches of more than one picture": all((c.batch or 1) == 1 for c in cells),
        "several local steps": all(cell.steps == 1 for cell in cells),
        "other seeds of masks and noise than one": len({cell.seed for cell in cells}) == 1,
        "other checkpoints of the same recipe": len(shas) == 1,
    }
    return tuple(item for item, untried in items.items() if untried)


def applicable(client: Client) -> list[str]:
    """The attacks that make pictures of such a client, as far as its facts tell: none that is made
    for what it does not do, that its network or upload does not suit, or that takes single
    pictures as another attack of the list does."""
    cell = client.cell
    masks = any(line.some_above_zero("zero_rows") for line in client.attacks)
    unfit = {"no picture"}
    unfit |= set() if cell.gamma and not masks else {"shuffled alone"}
    unfit |= set() if some_unshuffled(client) else {"unshuffled uploads"}
    names = [name for name in ATTACKS if not unfit & traits_of(name)]
    if (cell.batch or 1) == 1:
        names = [name for name in names if not hasattr(find_attack(name), "alone")]
    refused = _refused(client, names)
    return [name for name in names if name not in refused]


def _refused(client: Client, names: Sequence[str]) -> set[str]:
    """Those of the attacks that the client's network or upload does not suit."""
    from mjp_privacy.experiment.plan import foreseen, refused_by_block
    from mjp_privacy.experiment.source import META, ModelVariants
    from mjp_privacy.models.loading import outline_model

    cell = client.cell
    text = cell.architecture or ""
    if other := OTHERS.match(text):
        return {name for name in names if lacks_parts(name, other["family"].lower())}
    if (found := SIZES.fullmatch(text)) is None or cell.pixels is None:
        return set()  # nothing is known of it
    family = "vit" if found["kind"] == "vit" else "timm"
    refused = {name for name in names if lacks_parts(name, family)}
    masks: dict[str, Any] = {}
    if _masks(client):
        masks = {"unknown_embedding": True, "unknown_init": "zeros"}
    try:
        outline = outline_model(
            checkpoint="random",
            img_size=cell.pixels,
            patch_size=int(found["patch"]),
            embed_dim=int(found["width"]),
            depth=int(found["depth"] or UNKNOWN_DEPTH),
            num_heads=int(found["heads"] or 1),
            position_embedding="none" if found["table"] else cell.position_embedding,
            first_block=cell.first_block,
            **masks,
        )
        config = _config(cell)
    except UserError:  # of another version
        return refused
    variants = ModelVariants(outline, META)
    recorded = "client_label" in cell.other  # nobody can alter its block 0 any more
    for name in names:
        attack = find_attack(name)
        assert not isinstance(attack, Control)
        asked = Cell(
            *(cell.model, cell.setting, cell.gamma, cell.dtype),  # type: ignore[arg-type]
            *(AttackConfig(name), None, None, config),
        )
        altered = refused_by_block(outline, attack) if recorded else None
        if altered or foreseen(variants, asked, attack.needs):
            refused.add(name)
    return refused


def _masks(client: Client) -> bool:
    """Whether the client's model has an unknown embedding, as far as the report tells."""
    label = client.cell.model
    same = (other.cell for other in (client, *client.others) if other.cell.model == label)
    return any(cell.gamma or cell.trained_gamma for cell in same)


def _config(cell: CellFacts) -> ClientConfig:
    """The client's configuration, out of its facts. Its defences change numbers alone, and may be
    somebody's own: no attack is refused for them."""
    values: dict[str, Any] = {f.name: getattr(cell, f.name) for f in fields(ClientConfig)}
    values["withhold"] = tuple(filter(None, cell.withhold.split(", ")))
    del values["defenses"]
    return ClientConfig(**{name: value for name, value in values.items() if value is not None})
