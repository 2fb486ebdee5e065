"""What is known of a federation's attacks before a round of it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attacks import find_attack
from mjp_privacy.experiment.config import AttackConfig, Cell
from mjp_privacy.experiment.refusals import SimulatedForesight
from mjp_privacy.federation.config import FederationConfig, Probe, probe_client
from mjp_privacy.federation.recording import kept_names
from mjp_privacy.federation.task import FIELDS
from mjp_privacy.interfaces import Attack, Control
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.loading import RANDOM, outline_model


def inapplicable_attacks(config: FederationConfig) -> tuple[str, ...]:
    """A line for each attack that will not apply to what a probe records, with the reason.

    "multi_round: it needs 6 uploads of the same images; a probe records 1"
    """
    if not (config.attacks and config.record.rounds):
        return ()
    outlook = SimulatedForesight.of(_outline(config))
    lines: dict[str, None] = {}  # an ordered set
    for probe in config.record.probes:
        for named in config.attacks:
            attack = find_attack(named.name, named.options)
            if isinstance(attack, Control):
                continue
            if reason := _reason(config, probe, named, attack, outlook):
                lines[f"{named.title}: {reason}"] = None
    return tuple(lines)


def _reason(
    config: FederationConfig,
    probe: Probe,
    named: AttackConfig,
    attack: Attack,
    outlook: SimulatedForesight,
) -> str:
    """Why the attack does not apply to the uploads of this probe; empty if nothing says so."""
    if attack.uploads > probe.uploads:
        needed = f"it needs {attack.uploads} uploads of the same images"
        return f"{needed}; a probe records {probe.uploads}"
    client = probe_client(config.client, probe)
    cell = Cell("", config.setting, config.gamma, "float32", named, None, None, client)

    def recorded(model: LoadedModel) -> Sequence[str]:
        kept = kept_names(config, model)
        return [name for name in attack.needs(model) if name in kept]

    refusal = outlook.refuses(cell, attack, recorded)
    return "" if refusal is None else refusal.text


def _outline(config: FederationConfig) -> LoadedModel:
    """The federation's network without weights."""
    shape, initial = config.model, config.initial
    fields: dict[str, Any] = {name: getattr(shape, name) for name in FIELDS}
    if shape.position_embedding == "none":
        fields["position_embedding"] = "strict"
    if initial is None:
        return outline_model(None, whole=True, checkpoint=RANDOM, **fields)
    fields |= {"dal": None, "unknown_embedding": shape.unknown_embedding or None}
    return outline_model(
        initial.model,
        whole=True,
        checkpoint=initial.checkpoint,
        unknown_init="mean_position",
        **fields,
    )
