"""From images to a picture in one command: train a federation, then attack its uploads."""

from __future__ import annotations

import sys
from pathlib import Path

from mjp_privacy.core.command import DONE, SOME_FAILED
from mjp_privacy.experiment.config import Experiment
from mjp_privacy.experiment.engines.options import EngineConfig
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
    by: EngineConfig | None = None,
) -> int:
    """Train, attack what was recorded, and draw it; 0, or 3 if some image or cell failed.

    engine  who runs the clients, a name of `ENGINES`
    stale   what to do with results that an attack's earlier code made, as in `run_experiment`
    by      who attacks what was recorded, also as there; None: this process
    """
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
    from mjp_privacy.federation.picture import draw_rounds

    print(draw_rounds([out], out))
    print(f"Next: mjp report {out / ATTACK} --out {out / ATTACK / 'report'}")
    return DONE if summary.exit_code == 0 else SOME_FAILED


def attack_experiment(config: FederationConfig) -> Experiment:
    """The config's attacks as an experiment; models and clients come from the uploads."""
    return Experiment(config.name, attacks=config.attacks, seed=config.seed)
