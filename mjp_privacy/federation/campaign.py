"""From images to a picture in one command: train a federation, then attack its uploads."""

from __future__ import annotations

from pathlib import Path

from mjp_privacy.core.command import DONE, SOME_FAILED
from mjp_privacy.experiment.config import Experiment
from mjp_privacy.experiment.other_code import Stale
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.federation.config import FederationConfig
from mjp_privacy.federation.engines import ENGINES
from mjp_privacy.federation.rounds import ATTACK, UPLOADS


def campaign(
    config: FederationConfig,
    data: Path,
    out: Path,
    val: Path | None = None,
    device: str = "auto",
    engine: str = "inprocess",
    stale: Stale = "ask",
) -> int:
    """Train, attack what was recorded, and draw it; 0, or 3 if some image or cell failed.

    stale: what to do with results that an attack's earlier code made, as in `run_experiment`
    """
    entry = ENGINES[engine]
    print(entry.load()(config, data, out, val=val, device=device, **entry.preset))
    if not config.attacks or not config.record.rounds:
        return DONE
    summary = attack_uploads(
        attack_experiment(config), out / UPLOADS, out / ATTACK, device=device, stale=stale
    )
    from mjp_privacy.federation.picture import draw_rounds

    print(draw_rounds([out], out))
    print(f"Next: mjp report {out / ATTACK} --out {out / ATTACK / 'report'}")
    return SOME_FAILED if summary.failures else DONE


def attack_experiment(config: FederationConfig) -> Experiment:
    """The config's attacks as an experiment; models and clients come from the uploads."""
    return Experiment(config.name, attacks=config.attacks, seed=config.seed)
