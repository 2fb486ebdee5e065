"""From images to a picture in one command: train a federation, then attack its uploads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from attacks import find_attack
from mjp_privacy.core.command import DONE, SOME_FAILED
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, working_in
from mjp_privacy.core.read import is_there
from mjp_privacy.core.registry import Entry, Registry
from mjp_privacy.core.text import shown
from mjp_privacy.data.opening import keep_apart
from mjp_privacy.experiment.code import Stale
from mjp_privacy.experiment.config import Cell, Experiment, check_attacks
from mjp_privacy.experiment.engines.options import EngineConfig, engine_config
from mjp_privacy.experiment.refusals import META, foreseen
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.source import ModelVariants
from mjp_privacy.federation.config import FederationConfig, probe_client
from mjp_privacy.federation.recording import kept_names
from mjp_privacy.federation.rounds import ATTACK, UPLOADS
from mjp_privacy.federation.task import network
from mjp_privacy.interfaces import Attack, Control
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.loading import outline_model


def campaign(
    config: FederationConfig,
    data: Path,
    out: Path,
    val: Path | None = None,
    device: str = "auto",
    engine: str = "inprocess",
    stale: Stale = "ask",
    by: EngineConfig | None = None,
) -> int:
    """Train, attack what was recorded, and draw it; 0, or 3 if some image or cell failed.

    engine  who runs the clients, a name of `ENGINES`
    stale   what to do with results that an attack's earlier code made, as in `run_experiment`
    by      who attacks what was recorded, also as there; None: this process
    """
    check_campaign(config, data, out, val, by)
    with working_in(out):  # from the first round to the picture
        entry = ENGINES[engine]
        print(entry.load()(config, data, out, val=val, device=device, **entry.preset))
        if not config.attacks or not config.record.rounds:
            return DONE
        summary = attack_uploads(
            attack_experiment(config),
            out / UPLOADS,
            out / ATTACK,
            device=device,
            stale=stale,
            engine=by,
        )
        if summary.not_done:
            print("Not attacked, and nothing drawn; the same command goes on:", file=sys.stderr)
            print("\n".join(f"  {line}" for line in summary.not_done), file=sys.stderr)
            return SOME_FAILED
        from mjp_privacy.federation.comparison import draw_rounds

        print(draw_rounds([out], out))
        print(f"Next: mjp report {out / ATTACK}")
        return DONE if summary.exit_code == 0 else SOME_FAILED


def check_campaign(
    config: FederationConfig,
    data: Path,
    out: Path,
    val: Path | None = None,
    by: EngineConfig | None = None,
) -> None:
    """Raise for what would stop the attacks after hours of training, and say what will not apply.

    The attacks are no part of what is trained: after a correction the same folder goes on.
    """
    keep_apart(out, {"--data": data, "--val": val})
    check_attacks(config.attacks, config.name)
    if by is not None:
        engine_config(by)
    output_folder(out)
    if is_there(out / ATTACK) and not (out / ATTACK).is_dir():
        raise UserError(
            f"{shown(out / ATTACK)}: expected a folder for the attacks, or nothing; got a file. "
            "Give another --out, or move it away."
        )
    for line in inapplicable_attacks(config):
        print(f"not applicable: {line}", file=sys.stderr)


def attack_experiment(config: FederationConfig) -> Experiment:
    """The config's attacks as an experiment; models and clients come from the uploads."""
    return Experiment(config.name, attacks=config.attacks, seed=config.seed)


ENGINES: Registry[Entry] = Registry("engine")

_FLOWER = "mjp_privacy.federation.flower.run:run_flower"
ENGINES.register(
    "inprocess", Entry("mjp_privacy.federation.rounds:federate", "this process, round by round")
)
ENGINES.register("flower", Entry(_FLOWER, "Flower's simulation, on Ray", {"engine": "flower"}))
ENGINES.register(
    "flower-deployment",
    Entry(_FLOWER, "a Flower SuperLink with SuperNodes", {"engine": "flower-deployment"}),
)


def inapplicable_attacks(config: FederationConfig) -> tuple[str, ...]:
    """A line for each attack that will not apply to what a probe records, with the reason.

    "multi_round: it needs 6 uploads of the same images; a probe records 1"
    """
    if not (config.attacks and config.record.rounds):
        return ()
    outline = ModelVariants(outline_model(whole=True, **network(config)), META)
    lines: dict[str, None] = {}  # an ordered set
    for probe in config.record.probes:
        for named in config.attacks:
            attack = find_attack(named.name, named.options)
            if isinstance(attack, Control):
                continue
            if attack.uploads > probe.uploads:
                needed = f"it needs {attack.uploads} uploads of the same images"
                lines[f"{named.title}: {needed}; a probe records {probe.uploads}"] = None
                continue
            client = probe_client(config.client, probe)
            cell = Cell("", config.setting, config.gamma, "float32", named, None, None, client)
            refusal = foreseen(outline, cell, partial(_recorded, config, attack))
            if refusal is not None:
                lines[f"{named.title}: {refusal.text}"] = None
    return tuple(lines)


def _recorded(config: FederationConfig, attack: Attack, model: LoadedModel) -> Sequence[str]:
    """What an attack reads of what is recorded."""
    kept = kept_names(config, model)
    return [name for name in attack.needs(model) if name in kept]
