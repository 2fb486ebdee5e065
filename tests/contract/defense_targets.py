"""The defences that the contract tests, each as the line of text that a config has.

A registered defence without a line here is tested too: alone where its options have defaults, else
with 0.5 as its main option. Give it lines where other values matter.
"""

import dataclasses

from mjp_privacy.client.defenses.registry import DEFENSES, defense_class

LISTED = (
    *("gaussian_noise 0.1", "gaussian_noise 2", "dp_sgd 0.5", "dp_sgd 0", "dp_sgd 2 clip 0.1"),
    *("top_k 0.1", "top_k 0.5", "prune 0.1", "prune 0.5", "float16", "int8", "sign"),
    *("percentile_privacy 10", "percentile_privacy 10 gamma 2", "percentile_privacy 50 gamma 0.3"),
    "percentile_privacy 10 gamma 8",
)
ON_REAL_GRADIENTS = {"sign": 5.1}
"""Defences whose error on the trained ViT's gradient is more than `BOUND` times what they declare,
and how many times it is: what they reach, not what would be right. `sign` declares what normal
entries would give, and a trained network's tensors have longer tails. Its declaration stays, for
published rows rest on it (results/defenses). No other defence belongs here."""


def default_line(name: str) -> str:
    """The line of a defence for which none is listed: `yours`, or `yours 0.5`."""
    plugin = defense_class(name)
    main = next((f for f in dataclasses.fields(plugin) if f.name == plugin.main), None)
    needs_value = main is not None and main.default is dataclasses.MISSING
    return f"{name} 0.5" if needs_value else name


NAMED = {line.split()[0] for line in LISTED}
LINES = (*LISTED, *(default_line(name) for name in DEFENSES if name not in NAMED))
