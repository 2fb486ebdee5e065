r"""Which tokens of a batch are of one picture: attention adds up the tokens of one picture alone.

For a token with the query q and the sum o of one head, and the keys and values of the tokens y that
stood beside it (the class token among them, which every picture has),

    sum_y exp(q . k_y / sqrt(d)) (v_y - o) = 0.

With all tokens that were found in place of y, each with an unknown weight, this is a linear system,
D equations for at most N B weights that are 1 for the picture's own tokens and 0 for others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.equations.token_search import Token, TokenSearch


def linked(
    search: TokenSearch, tokens: Sequence[Token], batch: int, least: float
) -> list[list[Token]]:
    """Tokens by picture: at most `batch` lists, no position twice in one.

    least  the mean weight from which a token joins those of a picture, below 1
    """
    if not tokens:
        return []
    weights, misfits = _weights(search, tokens, batch)
    both, pictures, left = (weights + weights.mT) / 2, list[list[Token]](), {*range(len(tokens))}
    while left and len(pictures) < batch:
        members = [min(left, key=lambda one: float(misfits[one]))]
        while True:
            places = {tokens[one].place for one in members}
            others = [one for one in left if tokens[one].place not in places]
            near = both[members][:, others].mean(0)
            if not others or float(near.max()) < least:
                break
            members.append(others[int(near.argmax())])
        left -= set(members)
        pictures.append([tokens[one] for one in members])
    return pictures


def _weights(search: TokenSearch, tokens: Sequence[Token], batch: int) -> tuple[Tensor, Tensor]:
    """Each token's weights for all of them (m, m), and what its equations leave over (m,)."""
    from scipy.optimize import nnls

    patches, places = _with_substitutes(search, tokens, batch)
    q, k, v = _heads(search, patches, places)
    fixed = len(q[0]) - len(places)
    positions = torch.nn.functional.one_hot(torch.tensor(places)).T.to(v)
    weights, misfits = torch.zeros(len(tokens), len(tokens)), torch.zeros(len(tokens))
    for index, token in enumerate(tokens):
        own = q[:, fixed + index]
        powers = torch.einsum("hd,hnd->hn", own, k) * own.shape[-1] ** -0.5
        powers = (powers - powers.amax(1, keepdim=True)).exp()
        sums = token.attended.view(len(q), 1, -1)
        columns = (powers[:, :, None] * (v - sums)).permute(0, 2, 1).flatten(0, 1)
        length = columns[:, fixed:].norm(dim=0).median()
        left = torch.cat((columns[:, fixed:] / length, positions))
        right = torch.cat((-columns[:, :fixed].sum(1) / length, positions.new_ones(len(positions))))
        solved, misfits[index] = nnls(left.cpu().numpy(), right.cpu().numpy(), maxiter=10_000)
        weights[index] = torch.from_numpy(solved)[: len(tokens)]
    return weights, misfits


def _with_substitutes(
    search: TokenSearch, tokens: Sequence[Token], batch: int
) -> tuple[Tensor, list[int]]:
    """Patches and positions of the tokens, and for each position at which some are missing one
    more: what the mean picture leaves for those."""
    patches, places = [token.patch for token in tokens], [token.place for token in tokens]
    for place, mean in enumerate(search.guess.mean):
        here = [token.patch for token in tokens if token.place == place]
        if len(here) < batch:
            patches.append((batch * mean - sum(here)) / (batch - len(here)))
            places.append(place)
    return torch.stack(patches), places


def _heads(search: TokenSearch, patches: Tensor, places: list[int]) -> list[Tensor]:
    """Queries, keys and values (heads, tokens, d): of the tokens that all pictures have, and of
    patches (m, p) at these positions."""
    attention, count = search.block.attn, len(search.known)
    with torch.no_grad():
        whole = search.tokens(search.known)
        own = patches @ search.embedding.mT + search.rest[places]
        tokens = torch.cat((whole[:1], whole[count + 1 :], own))
        split = attention.qkv(search.block.norm1(tokens))
    return list(split.view(len(tokens), 3, attention.num_heads, -1).permute(1, 2, 0, 3))
