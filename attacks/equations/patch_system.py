r"""The linear system that one upload of a ViT holds about its patches, whatever the ViT's blocks.

With z_i = W x_i + beta + e_i at the input of block 0 and g_i = dL/dz_i,

    row i of pos_embed.grad = g_i,    patch_embed.proj.weight.grad = G = sum_i g_i x_i^T = A^T X,

A (N, D) the rows of all patches. A masked patch has E_unk added in place of e_i: its row of
pos_embed.grad is zero, and unk_embed.grad is the sum of the masked g_i. What the client's recipe
adds independently of the picture is computed and subtracted: weight decay in a weight difference,
and L_DAL's gradient d of the position table. How much of d_i a row holds is not known where the
client clips or scales, nor in a batch whose pictures have masks of their own. Behind LayerNorms g_i
is orthogonal to ones, so row i holds the share (row_i . 1) / (d_i . 1) of d_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, tensor
from torch.func import functional_call, grad

from attacks.budget import spent
from attacks.equations import CERTAIN, OUT_OF_RANGE, PATCH, PATCH_SYSTEM, TABLE, UNKNOWN
from attacks.equations.sent_gradients import (
    autocast_error,
    computing_as,
    effective_rate,
    holds_no_gradient,
    multiplied_rows,
    pseudo_gradient,
    weight_rounding,
)
from mjp_privacy.client.gradients import HALF
from mjp_privacy.core.machine import one_thread
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Pixels, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_images

ROUNDING = 16.0  # units in the last place of a weight by which a weight difference may be off
DECAYED = 2.0  # the same of a row that only decayed, in root mean square: rounding leaves .3
NOISE_TAIL = 5.0  # standard deviations by which the norm of pure noise may exceed its mean
AT_ONCE = 10  # steps of L-BFGS between looks at the time
NOISE_STEPS = 4  # times that the masked rows and the noise's level are found from each other


@dataclass(frozen=True)
class PatchSystem:
    """G = A^T X, float64, for n independent client steps."""

    rows: Tensor  # A (n, N, D); zero where a patch is hidden
    total: Tensor  # G (n, D, p)
    hidden: Tensor  # (n, N) bool: the patch was masked
    hidden_sum: Tensor | None = None
    """(n, D) the sum of the masked patches' rows, dL/dE_unk; None where that is not sent."""


def weights(view: AttackerView, update: ClientUpdate) -> Mapping[str, Tensor]:
    """The client's weights before the step, by name."""
    if update.weights_before is not None:
        return update.weights_before
    return {name: parameter.detach() for name, parameter in view.model.named_parameters()}


def gradient(view: AttackerView, update: ClientUpdate, name: str) -> Tensor:
    """The gradient of one parameter, (n, *shape), float64; computed from the weights' difference if
    weights were sent (`equations.sent_gradients`)."""
    sent = update.grads[name].double()
    if update.kind == "gradient":
        return sent
    return pseudo_gradient(update, sent, weights(view, update), name)


def of_pixels(model: MJPVisionTransformer) -> list[str]:
    """The parameters whose gradients depend on the pixels: all but the localization regressor's."""
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if not name.startswith("dal_regressor.")]


def patch_rows(model: MJPVisionTransformer, table: Tensor) -> Tensor:
    """The rows (n, N, D) of the patches in position tables (n, *table) or their gradients."""
    return table.flatten(1, -2)[:, model.rows_of_patches]


def patch_system(view: AttackerView, update: ClientUpdate) -> PatchSystem:
    """The system of one upload, less what does not depend on the picture."""
    rows = patch_rows(view.model, gradient(view, update, TABLE))
    total = gradient(view, update, PATCH).flatten(2)
    hidden = located(view, update)
    if update.dal_lambda and view.model.dal_regressor is not None:
        rows = rows - localization_part(view, update, rows, hidden)
    rows = multiplied_rows(update, rows)
    hidden_sum = gradient(view, update, UNKNOWN)[:, 0, 0] if UNKNOWN in update.grads else None
    return PatchSystem(torch.where(hidden.unsqueeze(-1), 0.0, rows), total, hidden, hidden_sum)


def located(view: AttackerView, update: ClientUpdate) -> Tensor:
    """(n, N) bool: the positions that the upload shows to be masked. Rows no longer than noise
    count as masked only if the model can mask at all."""
    can_mask = view.model.unk_embed is not None
    if update.position_noise and can_mask:
        table = update.grads[TABLE].double().flatten(1, -2)
        return _table_noise(table, update.position_noise, view.model.rows_of_patches)[1]
    rows = patch_rows(view.model, gradient(view, update, TABLE))
    several = can_mask and update.steps > 1  # rows of later steps alone, which are smaller, as well
    hidden = zero_rows(rows, table_rounding(view, update) if several else 0.0)
    if update.kind == "weight_difference" and update.weight_decay and can_mask:
        own = patch_rows(view.model, weights(view, update)[TABLE].double().unsqueeze(0))
        step = DECAYED * torch.finfo(update.dtype).eps * own.square().mean(-1).sqrt()
        hidden |= rows.square().mean(-1).sqrt() <= weight_rounding(update, step)
    if TABLE in update.noise and can_mask:
        longest = 1 + NOISE_TAIL / math.sqrt(2 * rows.shape[-1])
        noise = error_of(update, TABLE).unsqueeze(-1)
        hidden |= rows.square().mean(-1) <= (noise * longest).square()
    return hidden


def error_of(update: ClientUpdate, name: str) -> Tensor:
    """(n,) standard deviation of the error that the client's published defences, its noise on the
    table and its autocast leave on an entry of the gradient, float64; zero without them."""
    table = next(iter(update.grads.values()))
    zero = torch.zeros(len(table), dtype=torch.float64, device=table.device)
    parts = [errors.get(name, zero).to(zero) for errors in (update.noise, update.rounding)]
    if name in update.grads:
        parts.append(autocast_error(update, name, update.grads[name]))
    if name == TABLE in update.grads and update.position_noise:
        rows = update.grads[TABLE].double().flatten(1, -2)
        parts.append(_table_noise(rows, update.position_noise, slice(None))[0])
    size = torch.stack(parts).square().sum(0).sqrt()
    return size if update.kind == "gradient" else size / effective_rate(update)


def is_disturbed(update: ClientUpdate) -> bool:
    """Whether the client's published defences or its autocast added errors to what it sent. Noise
    on the table alone does not count: other layers stay exact, and they verify batches."""
    return bool(update.noise or update.rounding) or update.autocast != "none"


def table_rounding(view: AttackerView, update: ClientUpdate) -> float:
    """How far rounded weights may put an entry of the table's gradient off; 0 for a gradient."""
    if update.kind == "gradient":
        return 0.0
    largest = float(weights(view, update)[TABLE].abs().max())
    return weight_rounding(update, ROUNDING * torch.finfo(update.dtype).eps * largest)


def zero_rows(rows: Tensor, error: float = 0.0) -> Tensor:
    """Which rows (n, N, D) of the table's gradient are zero up to `error`; (n, N) bool."""
    return rows.abs().amax(-1) <= error


def _table_noise(table: Tensor, noise: float, of_patches: slice) -> tuple[Tensor, Tensor]:
    """The standard deviation (n,) of the recipe's noise on a table (n, rows, D), and which of the
    patches' rows are no longer than noise alone, (n, N) bool.

    It is `noise` times the rms of the table's nonzero entries before the noise, the other rows'
    included. How many entries are nonzero depends on the masked rows, so both are found in turn.
    """
    squares = table.square()
    total, entries = squares.sum((1, 2)), table[0].numel()
    rows, width = squares[:, of_patches].mean(-1), table.shape[-1]
    longest = 1 + NOISE_TAIL / math.sqrt(2 * width)  # a chi variable's mean and spread
    variance, hidden = total, torch.zeros_like(rows, dtype=torch.bool)
    for _ in range(NOISE_STEPS):
        nonzero = entries - hidden.sum(-1) * width
        variance = noise**2 * total / (nonzero + noise**2 * entries)
        hidden = rows <= variance.unsqueeze(-1) * longest**2
    return variance.sqrt(), hidden


LEVEL = 0.5
"""By how much the share of L_DAL in a row may differ from that of all rows together: rows whose
declared noise hides such a difference get the latter."""


def localization_part(
    view: AttackerView, update: ClientUpdate, rows: Tensor, hidden: Tensor
) -> Tensor:
    """What L_DAL adds to the patches' rows (n, N, D) of the table's gradient, in the client's own
    precision. An altered block 0 has no LayerNorm that would show how much of it was sent."""
    model = view.model
    used = _Localization(model)
    table = f"model.{TABLE}"
    state = {f"model.{name}": value.detach() for name, value in weights(view, update).items()}

    def loss(values: Tensor, mask: Tensor) -> Tensor:
        """dal_lambda * L_DAL as a function of the position table: scaled before it is rounded."""
        value = functional_call(used, {**state, table: values}, (mask,))
        return update.dal_lambda * value

    with computing_as(update, state[table].device):
        part = torch.stack([grad(loss)(state[table], mask) for mask in hidden])[:, 0, 1:].double()
    # A row's part depends on its own embedding alone, but for the PCA of all that are visible.
    apart = update.batch > 1 and model.unk_embed is not None and model.dal_kind != "pca"
    if model.first_block != "intact" or update.optimizer != "sgd":
        return part
    sent, own = rows.sum(-1, keepdim=True), part.sum(-1, keepdim=True)
    half = HALF.get(update.autocast, update.dtype)
    rounded = ROUNDING * torch.finfo(half).eps * (rows.norm(dim=-1) + part.norm(dim=-1))
    level = (error_of(update, TABLE).square() + table_rounding(view, update) ** 2).unsqueeze(-1)
    error = (rounded.square() + rows.shape[-1] * level).sqrt().unsqueeze(-1)
    whole = own.square().sum(1, keepdim=True).clamp_min(torch.finfo(own.dtype).tiny)
    share = (sent * own).sum(1, keepdim=True) / whole
    if not update.clipped:  # as declared, where nothing says otherwise
        doubt = (error * own).square().sum(1, keepdim=True).sqrt() / whole
        share = torch.where((share - 1).abs() <= NOISE_TAIL * doubt, 1.0, share)
    if apart:
        trusted = 1 / (1 + (error / (LEVEL * own.abs().clamp_min(1e-300))).square())
        share = share + trusted * (sent / torch.where(own == 0, 1.0, own) - share)
    return share * part


class _Localization(torch.nn.Module):
    """L_DAL as a module's forward, so that it can be called with other weights."""

    def __init__(self, model: MJPVisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, mask: Tensor) -> Tensor:
        """L_DAL for the mask of one picture."""
        return self.model.dal_loss(mask)


# why the system may not hold ----------------------------------------------------------------------


def lacks_positions(model: MJPVisionTransformer) -> Refusal | None:
    """Why there is no gradient of the position table, or None."""
    if model.pos_embed is not None:
        return None
    text = (
        "the model has no table of positions that is learned and added to the patches as its patch "
        "embedding gives them, row by row and without a norm between"
    )
    return Refusal("positions", text)


def lacks_gradients(view: AttackerView, *names: str) -> Refusal | None:
    """Why the gradients of these parameters cannot be taken from the view's uploads, or None.

    lacks_gradients(view, "pos_embed", "patch_embed.proj.weight")
    """
    for update in view.updates:
        absent = [name for name in names if name not in update.grads]
        if absent:
            return no_gradient(view.model, *absent)
        refusal = holds_no_gradient(update)
        if refusal is not None:
            return refusal
    return None


def no_gradient(model: MJPVisionTransformer, *names: str) -> Refusal:
    """The refusal of uploads that lack the gradients of these parameters, with the reason where
    the model tells it: no_gradient(model, "pos_embed")."""
    text = f"the upload holds no gradient of {', '.join(names)}"
    if strange := [name for name in names if name not in dict(model.named_parameters())]:
        text = f"the network has no {', '.join(strange)}, in timm's words, which the attack reads"
    if model.adapters is not None:
        text += ": the client sends low-rank adapters (LoRA), and its own weights are frozen"
    return Refusal("missing_gradient", text)


def lacks_patch_system(view: AttackerView) -> Refusal | None:
    """Why a view gives no patch system with enough equations for the patches, or None."""
    model = view.model
    refusal = lacks_positions(model) or lacks_gradients(view, *PATCH_SYSTEM)
    return refusal or too_few_equations(model)


def too_few_equations(
    model: MJPVisionTransformer, *, extra: int = 0, who: str = "closed forms"
) -> Refusal | None:
    """The refusal of a model with more patches N, and `extra` unknowns, than its width D; or None.

    It states the inequality and the way out, in the same words wherever it is shown:
    too_few_equations(model) for a ViT-Ti/16 at 224: "N = 196 patches > D = 192: closed forms need
    patches <= width; up to 208 px they apply".
    """
    patches, width = model.grid.patches, model.embed_dim
    if patches + extra <= width:
        return None
    more = f" + {extra}" if extra else ""
    most = math.isqrt(max(width - extra, 0))
    way_out = f"up to {most * model.patch_size} px they apply"
    if model.grid.rows != model.grid.columns:
        way_out = f"up to {max(width - extra, 0)} patches they apply"
    elif most < 2:
        way_out = "no picture of more than one patch is small enough"
    return Refusal(
        "underdetermined",
        f"N{more} = {patches + extra} {'unknowns' if extra else 'patches'} > D = {width}: {who} "
        f"need patches{more} <= width; {way_out}",
    )


def unless_underdetermined(refusal: Refusal | None) -> Refusal | None:
    """The refusal, or None if it says that equations are too few: a prior makes up for those."""
    if refusal is not None and refusal.kind == "underdetermined":
        return None
    return refusal


# a solved system ----------------------------------------------------------------------------------


def solution(
    view: AttackerView, system: PatchSystem, patches: Tensor, values: Tensor
) -> Reconstruction:
    """Solved patches (n, N, p) as pictures, with the system's condition and rank.

    values: the singular values of the system's rows
    """
    facts = condition_and_rank(system.rows, view.updates[0].dtype, values)
    return of_steps(view, patches, system.hidden, facts)


def of_steps(
    view: AttackerView, patches: Tensor, hidden: Tensor, facts: Mapping[str, Tensor]
) -> Reconstruction:
    """A picture (n, N, p), a mask (n, N) and diagnostics (n,) of each step, for all its images."""
    return Reconstruction(
        pictures(view, patches),
        mask=per_image(view, hidden),
        diagnostics={name: per_image(view, fact) for name, fact in facts.items()},
    )


# patches and pictures -----------------------------------------------------------------------------


def to_unit_range(view: AttackerView, images: Tensor) -> Tensor:
    """Images in the model's normalised space (..., C, H, W) -> clipped to [0, 1]."""
    mean = torch.tensor(view.pixels.mean).to(images).view(-1, 1, 1)
    std = torch.tensor(view.pixels.std).to(images).view(-1, 1, 1)
    return (images * std + mean).clamp(0, 1)


def pictures(view: AttackerView, patches: Tensor) -> Tensor:
    """Normalised patches (n, N, p) of n client steps -> images (m, C, H, W) in [0, 1].

    An attack that solves for one picture per client step gives it for each image of the step.
    """
    return pictures_of(view, patches).repeat_interleave(view.updates[0].batch, 0)


def pictures_of(view: AttackerView, patches: Tensor) -> Tensor:
    """Normalised patches (m, N, p) of m pictures -> images (m, C, H, W) in [0, 1]."""
    return to_unit_range(view, to_images(patches, view.model.grid, view.model.patch_size))


ROUNDED, FEW = 0.02, 1e-3
"""How far rounding may move a pixel out of [0, 1], and what share of others says nothing."""


def certain_of(view: AttackerView, patches: Tensor, verified: Tensor) -> dict[str, Tensor]:
    """Diagnostics of pictures (m, N, p), normalised, that layers verify or not, bool (m,): verified
    ones are certain if their pixels lie within [0, 1] under the declared mean and std. Where those
    of some do not, what share of each such picture's is out of range."""
    levels = in_levels(patches, view.pixels, view.model.patch_size)
    share = ((levels - 0.5).abs() > 0.5 + ROUNDED).double().mean((1, 2)).cpu()
    out = verified & (share > FEW)
    found = {CERTAIN: (verified & ~out).double()}
    return found | ({OUT_OF_RANGE: share.where(out, 0)} if bool(out.any()) else {})


def per_image(view: AttackerView, values: Tensor) -> Tensor:
    """One value or row per client step -> one per image, (n, ...) -> (m, ...)."""
    return values.repeat_interleave(view.updates[0].batch, 0)


def black_and_white(pixels: Pixels, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the model's normalised space, (C, 1, 1)."""
    mean, std = (torch.tensor(each).view(-1, 1, 1).to(like) for each in (pixels.mean, pixels.std))
    return -mean / std, (1 - mean) / std


# patches in [0, 1] --------------------------------------------------------------------------------


def in_levels(patches: Tensor, pixels: Pixels, patch_size: int) -> Tensor:
    """Normalised patches (N, p) in [0, 1]."""
    scale, zero = normalisation(pixels, patch_size, patches)
    return patches * scale + zero


def normalised(levels: Tensor, pixels: Pixels, patch_size: int) -> Tensor:
    """Patches (N, p) in [0, 1] as the model sees them."""
    scale, zero = normalisation(pixels, patch_size, levels)
    return (levels - zero) / scale


def normalisation(pixels: Pixels, patch_size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(p,) std and mean of each pixel of a patch."""
    area = patch_size**2
    std, mean = (
        tensor(values, dtype=like.dtype, device=like.device) for values in (pixels.std, pixels.mean)
    )
    return std.repeat_interleave(area), mean.repeat_interleave(area)


# least squares with the conventions of LAPACK's gelsd, the solver that breaching uses -------------


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """Moore-Penrose inverse; singular values below eps * max(shape) * largest count as zero."""
    return torch.linalg.pinv(matrix, rtol=torch.finfo(matrix.dtype).eps * max(matrix.shape))


def minimum_norm_solve(a: Tensor, b: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The minimum-norm least-squares solution z of a^T z = b, and a's singular values.

    a (n, R, D), b (n, D, K) -> z (n, R, K), singular values (n, min(R, D)), descending.
    factor (m, D): the right-hand side is factor^T b, with b (n, m, K), and is never formed. Each
    precision but float64 is raised to that first.
    """
    factor = None if factor is None else factor.double()
    if a.device.type != "cpu":
        right = b.double() if factor is None else factor.mT @ b.double()
        return _by_singular_vectors(a.double(), right)
    z = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.double)
    values = torch.zeros(len(a), min(a.shape[-2:]), dtype=torch.double)

    def solve(index: int) -> None:
        z[index], values[index] = _solve_rows(a[index], b[index], factor)

    for_each_in_threads(solve, len(a))
    return z, values


def least_squares(a: Tensor, b: Tensor) -> Tensor:
    """The z (R, K) of least norm that brings a^T z nearest to b, for a (R, D) and b (D, K).

    Not `torch.linalg.lstsq`, whose driver on a CPU begins with columns in an order that nothing
    sets: two calls round otherwise.
    """
    return minimum_norm_solve(a.unsqueeze(0), b.unsqueeze(0))[0][0]


def _solve_rows(a: Tensor, b: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """One system, by QR of its nonzero rows, which takes half the time of singular vectors.

    A zero row of a has a zero row of z. Where the other rows are dependent, or more than a has
    columns, the singular vectors are needed for the minimum norm.
    """
    used = (a != 0).any(-1)
    rows, right = a[used].double(), b.double()
    if len(rows) <= a.shape[-1]:
        q, r = torch.linalg.qr(rows.mT)
        s = torch.linalg.svdvals(r)
        if not len(s) or bool(s[-1] > _cutoff(s, a)):
            inside = q.mT @ right if factor is None else (factor @ q).mT @ right
            solved = torch.linalg.solve_triangular(r, inside, upper=True)
            z = solved.new_zeros(len(a), b.shape[-1])
            z[used] = solved
            return z, torch.nn.functional.pad(s, (0, min(a.shape) - len(s)))
    return _by_singular_vectors(a.double(), right if factor is None else factor.mT @ right)


def _by_singular_vectors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(a, full_matrices=False)  # a^T = vh^T s u^T
    inverse = torch.where(s > _cutoff(s, a), 1 / s.clamp_min(torch.finfo(s.dtype).tiny), 0.0)
    return u @ (inverse.unsqueeze(-1) * (vh @ b)), s


def _cutoff(s: Tensor, a: Tensor) -> Tensor:
    """What singular values s of a must exceed to count in a solution, as in gelsd."""
    return torch.finfo(s.dtype).eps * max(a.shape[-2:]) * s[..., :1]


def condition_and_rank(
    a: Tensor, dtype: torch.dtype, singular_values: Tensor | None = None
) -> dict[str, Tensor]:
    """Condition number over the nonzero rows of a (n, R, D), numerical rank, and counts of rows.

    `dtype` is the precision in which the gradient was computed: a singular value below
    eps(dtype) * max(shape) * largest is noise and does not count for the rank.
    """
    nonzero = (a != 0).any(-1).sum(-1)
    s = torch.linalg.svdvals(a.double()) if singular_values is None else singular_values
    rows = nonzero.clamp(1, s.shape[-1])
    smallest = s.gather(-1, (rows - 1).unsqueeze(-1)).squeeze(-1)
    cutoff = torch.finfo(dtype).eps * max(a.shape[-2:]) * s[..., :1]
    return {
        "cond_a": s[..., 0] / smallest,
        "rank_a": (s > cutoff).sum(-1).double(),
        "nonzero_rows": nonzero.double(),
        "zero_rows": (a.shape[-2] - nonzero).double(),
    }


def lbfgs(unknowns: Tensor, steps: int, history: int) -> torch.optim.LBFGS:
    """L-BFGS that does so many steps at each call and remembers `history` of them."""
    return torch.optim.LBFGS(
        [unknowns],
        max_iter=steps,
        history_size=history,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )


def minimised(
    value: Callable[[Tensor], Tensor], start: Tensor, steps: int, history: int
) -> tuple[Tensor, float]:
    """The point of least value on the way of so many steps of L-BFGS from a start, and that value;
    less where the time is over."""
    point, best = start.clone().requires_grad_(), (start, math.inf)
    optimizer = lbfgs(point, AT_ONCE, history)

    def closure() -> Tensor:
        nonlocal best
        optimizer.zero_grad()
        here = value(point)
        here.backward()
        if float(here.detach()) < best[1]:
            best = point.detach().clone(), float(here.detach())
        return here.detach()

    for _ in range(0, steps, AT_ONCE):
        optimizer.step(closure)
        if spent():
            break
    return best


def for_each_in_threads(work: Callable[[int], None], number: int) -> None:
    """Does work(0), ..., work(number - 1), as many at a time as torch may use threads.

    Each runs with one thread of its own, so that the results are the same bits whatever the number
    of threads. Decompositions of matrices of a few hundred rows gain nothing from a second one.
    """
    threads = min(torch.get_num_threads(), number)
    with one_thread():
        if threads <= 1:
            for index in range(number):
                work(index)
            return
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(work, range(number)):
                pass  # reading the results raises what a thread raised
