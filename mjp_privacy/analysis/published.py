"""What the paper prints of its position embeddings: Tables 6 and 8, of DeiT-S (14×14, width 384).

The supplement prints Table 8 as its Table 2. Figures 1, 4, 7 and 8 come without numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

GRID, WIDTH = 14, 384


@dataclass(frozen=True)
class PublishedTable:
    """One model of the paper. None: not printed.

    variance      Table 6, percent of the variance in 3, 4, 5, 6 and 7 dimensions
    mae_1d, ...   Table 8, mean absolute errors in patches with their ±
    """

    model: str
    variance: tuple[float, float, float, float, float] | None
    mae_1d: float
    std_1d: float
    mae_2d: float
    std_2d: float


PUBLISHED = (
    PublishedTable("DeiT-S", (54.61, 68.55, 77.95, 85.54, 90.74), 0.945, 0.031, 0.076, 0.004),
    PublishedTable(
        *("DeiT-S+MJP", (46.74, 58.36, 69.10, 78.13, 84.55)), *(1.301, 0.035, 0.134, 0.003)
    ),
    PublishedTable("DeiT-S+MJP (DAL-LN)", None, 0.566, 0.013, 0.042, 0.002),
)
"""Table 6 has one row of MJP and does not say with which DAL; the paper's model is that with the
nonlinear one (row J of Table 4), whose row of Table 8 stands beside it here."""

CAVEATS = (
    "The paper's lines are of DeiT-S: 14×14 patches of width 384, 300 epochs of ImageNet. A figure "
    "of another grid, width or training stands beside them, not against them.",
    "Table 6's row DeiT-S+MJP is no table of noise: one drawn from N(0, 1) at that size has about "
    "4 % of its variance in 3 dimensions, not 46.74 %. Under the recipe of Table 7 a start decays "
    "to e^-8.9 of itself (Σ of rate times decay); in a short training it stays.",
    "The paper gives no number for Figure 8's “more diverse and content-aware” attention; the two "
    "measures here are ours.",
)
