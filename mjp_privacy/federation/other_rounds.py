"""A federation of another length: what its config says in rounds is taken along in proportion.

with_rounds(config, 10)     a config of 120 rounds that records rounds 0, 60 and 110 in each of
                            which six uploads begin: 10 rounds, recorded from 0, 2 and 4 on
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mjp_privacy.core.errors import UserError
from mjp_privacy.federation.config import FederationConfig


def with_rounds(config: FederationConfig, rounds: int) -> FederationConfig:
    """The federation with this many rounds.

    Recorded rounds, warm-up and the rounds between two evaluations keep their share of the whole.
    The latest round that a probe can begin in stays the latest; rounds that become equal are
    recorded once. A cosine schedule spans the new number of rounds by itself.
    """
    if rounds == config.rounds:
        return config
    _check_enough(config, rounds)
    share = rounds / config.rounds
    server = config.server
    warmup = max(round(server.warmup * share), 1) if server.warmup else 0
    return replace(
        config,
        rounds=rounds,
        server=replace(server, warmup=warmup),
        record=replace(config.record, rounds=_recorded(config, rounds)),
        evaluate_every=max(round(config.evaluate_every * share), 1),
    )


def what_moved(before: FederationConfig, after: FederationConfig) -> str:
    """One line on what `with_rounds` changed; empty if nothing but the number of rounds did.

    "records rounds 0, 2, 4 instead of 0, 60, 110; evaluation every 2 instead of 20: --rounds 10 of
    120"
    """
    old, new = ((c.record.rounds, c.server.warmup, c.evaluate_every) for c in (before, after))
    values = (
        (f"records round{'s' if len(new[0]) > 1 else ''}", _listed(old[0]), _listed(new[0])),
        ("warm-up", str(old[1]), str(new[1])),
        ("evaluation every", str(old[2]), str(new[2])),
    )
    moved = [f"{name} {now} instead of {was}" for name, was, now in values if now != was]
    return f"{'; '.join(moved)}: --rounds {after.rounds} of {before.rounds}" if moved else ""


def longest_probe(config: FederationConfig) -> int:
    """The number of successive rounds that the longest probe takes."""
    return max((probe.uploads for probe in config.record.probes), default=1)


def _check_enough(config: FederationConfig, rounds: int) -> None:
    longest = longest_probe(config) if config.record.rounds else 1
    if rounds >= longest:
        return
    why = ", the rounds that a recorded client takes (record.probes)" if longest > 1 else ""
    raise UserError(
        f"--rounds: expected at least {longest}{why}, got {rounds}. Give --rounds {longest} or more"
        f"{', or fewer uploads of a probe in the config' if longest > 1 else ''}."
    )


def _recorded(config: FederationConfig, rounds: int) -> tuple[int, ...]:
    """`record.rounds` in proportion to the last round in which the longest probe can begin."""
    longest = longest_probe(config)
    old, new = config.rounds - longest, rounds - longest
    starts = (round(start * new / old) if old else 0 for start in config.record.rounds)
    return tuple(dict.fromkeys(starts))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
