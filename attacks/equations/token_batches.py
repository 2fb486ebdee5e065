"""Pictures of a client step of several: their tokens are told apart by what attention adds up.

Where a table tells places, each has one token of every picture; masked tokens of MJP's clients, and
all tokens of networks without a table, have none, and stand where borders and attention say once
they are known to be of one picture (`equations.attention`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attacks.equations.attention import groups, refined_groups, weights_in_sums
from attacks.equations.token_patches import FITS, StepPicture, StepTokens, centred
from attacks.equations.token_peeling import PeeledTokens
from mjp_privacy.interfaces import AttackerView, ClientUpdate
from mjp_privacy.models import MJPVisionTransformer

ROUNDS, HALF = 3, 0.5
"""Times that a picture's tokens are told from each other's weights, and the mean weight from which
one is of it where masks leave it open which places have a token."""


def token_pictures(
    view: AttackerView,
    update: ClientUpdate,
    step: int,
    model: MJPVisionTransformer,
    prior: str,
) -> list[StepPicture]:
    """The pictures of one client step, whose tokens are found; model: the client's, in float64."""
    of_step = StepTokens if update.batch == 1 else BatchTokens
    return of_step(view, update, step, model, prior).pictures()


class BatchTokens(StepTokens):
    """What one client step of several pictures says of their patches."""

    def _found(self, tokens: PeeledTokens, added: Tensor, places: Tensor) -> list[StepPicture]:
        """The step's pictures, in no order: tokens that attention adds up are of one."""
        least, where = places.min(1)
        masked = torch.zeros_like(where, dtype=torch.bool)
        if not self.tells_places:
            least, where = places[:, 0], torch.zeros_like(where)
        elif self.masked is not None:
            unplaced = self._fitted(tokens, added, self.masked[:1])[:, 0]
            masked, least = unplaced < least, torch.minimum(unplaced, least)
        fits = (least < FITS).nonzero().flatten()
        if tokens.attended is None or not len(fits):
            return [self._nothing()] * self.batch
        seen = self._seen(tokens, added, fits, where, masked)
        # All places together have N, and where nothing is masked each has one token of a picture.
        adds_up = added.new_full((1, len(fits)), 1 / self.count)
        if self.tells_places and self.masked is None:
            adds_up = nn.functional.one_hot(where[fits]).T.to(added)
            adds_up = adds_up[adds_up.any(1)]
        weights, errors = weights_in_sums(self.model, *seen, adds_up)
        both = (weights + weights.mT) / 2
        if self.tells_places:
            found = self._joined(both, errors, where[fits])
        else:
            found, masked = refined_groups(self.model, *seen, groups(both, self.batch)), ~masked
        pictures = [self._of_members(tokens, added, fits[one], where, masked) for one in found]
        pictures += [self._nothing()] * (self.batch - len(pictures))
        return [self._refined(tokens, one) for one in pictures]

    def _others(self, tokens: PeeledTokens, own: Tensor) -> Tensor | None:
        """What the layer behind attention receives of other tokens than a picture's `own`."""
        if tokens.received is None:
            return None
        is_other = torch.ones(len(tokens), dtype=torch.bool, device=own.device)
        is_other[own] = False
        return tokens.received[is_other]

    def _joined(self, both: Tensor, errors: Tensor, where: Tensor) -> list[Tensor]:
        """Which tokens are of one picture: those that add up with the surest one that is left."""
        left, found = torch.ones_like(where, dtype=torch.bool), list[Tensor]()
        here = where[None] == torch.arange(self.count).to(where)[:, None]
        while len(found) < self.batch and bool(left.any()):
            members = torch.where(left, errors, torch.inf).argmin()[None]
            for _ in range(ROUNDS):
                added_up = both[members].mean(0)
                if self.masked is None:  # one at each place
                    near = torch.where(here & left, added_up, -torch.inf)
                    members = near.argmax(1)[near.isfinite().any(1)]
                elif bool((left & (added_up > HALF)).any()):
                    members = (left & (added_up > HALF)).nonzero().flatten()
            left[members] = False
            found.append(members)
        return found

    def _of_members(
        self, tokens: PeeledTokens, added: Tensor, members: Tensor, where: Tensor, loose: Tensor
    ) -> StepPicture:
        """The picture of these tokens; nothing tells the places of the `loose` ones, (T,) bool."""
        found, shown, pieces = self._nothing(), members[~loose[members]], members[loose[members]]
        at = where[shown]
        found.token[at] = shown
        if len(shown):
            solved = self._patches(tokens.directions[shown], added[shown], self.own[at])
            found = found.with_patches(at, *solved)
        if not len(pieces):
            return found
        offset = self.masked if self.masked is not None and self.tells_places else self.own
        solved = self._patches(tokens.directions[pieces], added[pieces], offset[:1])
        return self._placed(found, pieces, *solved, tokens)

    def _seen(
        self, tokens: PeeledTokens, added: Tensor, fits: Tensor, where: Tensor, masked: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What block 0 is given beside patches (f, D), of tokens `fits` at these places (m, D), and
        what attention adds up for them (m, D)."""
        assert tokens.attended is not None
        where, offsets = where[fits], self.own[where[fits]]
        if self.masked is not None:
            offsets = torch.where(masked[fits][:, None], self.masked[:1], offsets)
        patches, _ = self._patches(tokens.directions[fits], added[fits], offsets)
        z, attended = self.embedding.tokens(patches, offsets), tokens.attended[fits]
        if tokens.taken_out is not None:
            along, sums = tokens.directions[fits], centred(z + added[fits])
            lengths = (along * sums).sum(1, keepdim=True) / along.square().sum(1, keepdim=True)
            attended = lengths * tokens.taken_out[fits]
        return torch.cat(self.others), z, attended
