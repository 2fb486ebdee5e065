"""The engines that can run a federation's rounds, by name.

To add one, write a function that takes the arguments of `rounds.federate` and returns the path of
the final model, and register it below.
"""

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
