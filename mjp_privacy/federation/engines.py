"""Who runs a federation's rounds, by name. To add an engine: a function of the same arguments as
`rounds.federate` that returns the final model's path, and a line below."""

from __future__ import annotations

from mjp_privacy.core.registry import Entry, Registry

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
