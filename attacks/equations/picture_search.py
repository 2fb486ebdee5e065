r"""Finds the pictures of a batch from their tokens.

Rounds of searches find tokens (`equations.token_search`), links say which are of one picture
(`equations.token_links`). A picture's tokens that are missing stand in the attention of those that
were found: their patches X are moved, from what the field prior says of them, until

    attention(X)_i = o_i    at the positions i that were found,

D equations a position. From there each one's own search ends at it. A picture counts once all of
its layers' inputs lie in their spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.completion import complete
from attacks.equations.span import Knowledge
from attacks.equations.token_links import linked
from attacks.equations.token_search import Token, TokenSearch
from mjp_privacy.models.jigsaw import to_images

STARTS = 4  # at each position in each round
SPREADS = (2.0, 4.0, 1.0)  # of the starts of a round, in standard deviations of the prior
FEW = 3  # tokens of a picture that say too little of the others
STEPS = 120  # of L-BFGS
WEIGHTS = (0.6, 0.8, 0.4, 0.6, 0.7, 0.5)
"""From which links count, in the completions after one round: strict ones leave tokens out, loose
ones join those of several pictures, which then do not stand in the batch."""


@dataclass
class PictureSearch:
    """The tokens of a batch, and its pictures: PictureSearch(generator).found(search, 2, 12, 1e-9)
    gives one picture; tokens of others are kept for the next call, whose batch is smaller."""

    generator: torch.Generator
    tokens: list[Token] = field(default_factory=list)
    waiting: list[tuple[list[Token], Tensor, float]] = field(default_factory=list)
    """Pictures that were found and not yet given: tokens, patches, share."""

    def found(
        self, search: TokenSearch, batch: int, rounds: int, enough: float
    ) -> tuple[Tensor, float] | None:
        """Patches (N, p) of one picture and what share of its inputs lies outside; None where so
        many rounds find none.

        All pictures that the upload shows are looked for before the first is given: taking one out
        of an upload adds its rounding to what is left.
        """
        if not self.waiting:
            self._look(search, batch, rounds, enough)
        if not self.waiting:
            return None
        own, patches, share = self.waiting.pop(0)
        self.tokens = [token for token in self.tokens if token not in own]
        return patches, share

    def _look(self, search: TokenSearch, batch: int, rounds: int, enough: float) -> None:
        """Rounds of searches and completions."""
        centre = search.coordinates(search.guess.mean)
        for number in range(rounds):
            self._searched(search, batch, number, centre, enough)
            for weight in WEIGHTS:
                pictures = linked(search, self.tokens, batch, weight)
                given = [token for own, _, _ in self.waiting for token in own]
                pictures = [own for own in pictures if not any(one in given for one in own)]
                for own in pictures:
                    self._looked_at(search, own, enough)
                if len(self.waiting) == batch or spent():
                    return
                known = len(self.tokens)
                self._completed(search, pictures, batch, enough)
                if len(self.tokens) == known and weight < WEIGHTS[0]:
                    break

    def _looked_at(self, search: TokenSearch, own: list[Token], enough: float) -> None:
        """Keep the picture of N tokens where it stands in the batch."""
        if len(own) < len(search.known):
            return
        patches = torch.stack([one.patch for one in sorted(own, key=lambda one: one.place)])
        share = share_of(search, patches)
        if share <= enough:
            self.waiting.append((own, patches, share))

    def _searched(
        self, search: TokenSearch, batch: int, number: int, centre: Tensor, enough: float
    ) -> None:
        """A round of searches from random starts, about the mean picture or, every other round,
        what it leaves for the tokens that are missing."""
        count, places, starts = len(centre), list[int](), list[Tensor]()
        for place in range(count):
            here = [token.patch for token in self.tokens if token.place == place]
            if len(here) == batch:
                continue
            middle = centre[place].clone()
            if here and number % 2:
                rest = (batch * search.guess.mean[place] - sum(here)) / (batch - len(here))
                middle[: len(search.units)] = (rest - search.known[place]) @ search.back
            places += [place] * STARTS
            starts += [middle] * STARTS
        if starts:
            at = torch.stack(starts)
            away = torch.randn(at.shape, generator=self.generator).to(at) * search.scale
            found = search.found(at + SPREADS[number % 3] * away, places, enough)
            self._kept(found, search, batch)

    def _kept(self, found: Sequence[Token], search: TokenSearch, batch: int) -> None:
        """Keep the tokens that are new."""
        new = list[Token]()
        for token in found:
            here = sum(other.place == token.place for other in (*self.tokens, *new))
            if here < batch and not token.is_one_of((*self.tokens, *new)):
                new.append(token)
        self.tokens += search.precisely(new)

    def _completed(
        self, search: TokenSearch, pictures: list[list[Token]], batch: int, enough: float
    ) -> None:
        """Searches from the completions of pictures."""
        places, starts = list[int](), list[Tensor]()
        for tokens in pictures:
            missing = sorted({*range(len(search.known))} - {token.place for token in tokens})
            if not missing or len(tokens) < FEW:
                continue
            starts.append(search.coordinates(completed(search, tokens))[missing])
            places += missing
        if places:
            self._kept(search.found(torch.cat(starts), places, enough), search, batch)


def share_of(search: TokenSearch, patches: Tensor) -> float:
    """What share of the layers' inputs of a picture (N, p) lies outside their spans."""
    with torch.no_grad():
        seen = to_images(patches, search.model.patch_size, len(search.energy.mean)).unsqueeze(0)
        return float(search.precise.off(seen))


def completed(search: TokenSearch, tokens: Sequence[Token]) -> Tensor:
    """A picture (N, p) with these tokens, whose other patches fit the attention of these."""
    exact, sums = torch.zeros_like(search.known), search.known.new_zeros(search.rest.shape)
    kept = torch.zeros(len(exact), dtype=torch.bool, device=exact.device)
    for token in tokens:
        exact[token.place], sums[token.place] = token.patch, token.attended
        kept[token.place] = True
    nothing = torch.zeros_like(kept)
    knowledge = Knowledge(search.known, search.guess.basis, nothing)
    likely = complete(knowledge, search.energy, kept, exact)
    known = search.known[~kept]
    moves = ((likely[~kept] - known) @ search.back).requires_grad_()
    size = sums[kept].square().mean()
    optimizer = torch.optim.LBFGS(
        [moves],
        max_iter=STEPS,
        max_eval=STEPS + STEPS // 4,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )

    def picture(moves: Tensor) -> Tensor:
        patches = exact.clone()
        patches[~kept] = known + moves @ search.units
        return patches

    def closure() -> Tensor:
        optimizer.zero_grad()
        off = (search.attended(picture(moves)) - sums)[kept].square().mean() / size
        (1e3 * off).backward()
        return 1e3 * off.detach()

    optimizer.step(closure)
    return picture(moves.detach())
