"""Accept rules of speculative decoding: which drafted tokens stand, and which token the target emits after them.

Every rule keeps the law of the target exactly. All are pure functions of tensors; leading dimensions `...` are batch
dimensions and may be absent. `K` is the number of drafted tokens (0 is allowed), `V` the vocabulary. Target logits are
float32, after the logits processors, and have K + 1 rows: row k is the target's law after the first k drafted tokens,
so the last row gives the bonus token. A target row that is no law (NaN, +inf, or nothing finite) raises `ValueError`
if a token has to be drawn from it; rows behind the emitted token are never read.

Randomness comes from `generator`, or from torch's global one, one uniform per row and no reseeding.

Rejection rule: Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318); for the children of a
tree node: Miao et al. 2024 (arXiv:2305.09781).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Probabilities are summed as integers in units of 2^-44 of the largest one: integer sums do not depend on their order,
# so a sort, a top-k and a masked sum agree to the last bit, on every device. Sums fit int64 for V < 2^19.
_UNIT = 2.0**44
_TOP_K = (64, 4096)  # what quantile_token looks at before it sorts the whole vocabulary
_ARGMAX_BLOCK = 256


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the target says about a drafted chain."""

    num_accepted: Tensor  # [...] int64, 0..K
    token: Tensor  # [...] int64, emitted after the accepted ones: correction, or bonus token when all K stand


@dataclass(frozen=True, eq=False)
class NodeVerdict:
    """What the target says about the children of one tree node."""

    child: Tensor  # [...] int64, index of the accepted child, -1 when all are refused
    token: Tensor  # [...] int64, the accepted child's token, or the target's own one


def first_argmax(logits: Tensor) -> Tensor:  # [..., V] -> [...]
    """`torch.argmax(logits, dim=-1)`, ties and NaN included, but vectorised on CPU."""
    short = -logits.shape[-1] % _ARGMAX_BLOCK
    blocks = (F.pad(logits, (0, short), value=-torch.inf) if short else logits).unflatten(-1, (-1, _ARGMAX_BLOCK))
    block = blocks.amax(-1).argmax(-1)  # the first block that holds the maximum
    return block * _ARGMAX_BLOCK + _row(blocks, block).argmax(-1)


def draw(weights: Tensor, u: Tensor) -> Tensor:  # [..., V], [...] -> [...]
    """Token with probability proportional to `weights` when `u` is uniform on [0, 1): inverse CDF in the order of ids.

    `weights` are finite, >= 0 and not all zero; a token of weight zero is never drawn. Draw drafts from q with it too:
    `torch.multinomial` has the same law and takes one random number per entry of the vocabulary instead of one.
    """
    weights = weights.float()
    edges = (weights / weights.amax(-1, keepdim=True)).mul_(_UNIT).long().cumsum(-1)
    level = (u.double() * edges[..., -1].double()).long()  # below the total, since u <= 1 - 2^-53
    return torch.searchsorted(edges, level[..., None], right=True).squeeze(-1)


def quantile_token(logits: Tensor, u: Tensor) -> Tensor:  # [..., V], [...] -> [...]
    """Token y with F_l(y) <= u < F_r(y), the target's own choice at noise `u`; see `quantile_interval` for F.

    u = 0 gives `torch.argmax(logits)`; a token of probability zero is never returned, however close u is to 1.
    Equal to `quantile_token_reference` bit by bit, by looking at the largest logits before sorting all of them.

    Raises:
        ValueError: `u` outside [0, 1), or a row of `logits` that is no law.
    """
    noise, vocab_size = _noise(u, logits).reshape(-1), logits.shape[-1]
    logits = logits.reshape(-1, vocab_size)
    mass = _integer_mass(logits)
    tokens = torch.empty_like(noise, dtype=torch.long)
    rows = torch.arange(len(noise), device=noise.device)  # rows not settled yet
    for k in _TOP_K:
        if k < vocab_size and len(rows):
            pick = rows if len(rows) < len(tokens) else slice(None)  # all of them: views, no copies
            tokens[pick], settled = _quantile_by_top_k(logits[pick], mass[pick], noise[pick], k)
            rows = rows[~settled]
    if len(rows):
        tokens[rows] = _quantile_by_sort(logits[rows], mass[rows], noise[rows])
    return tokens.reshape(u.shape)


def quantile_token_reference(logits: Tensor, u: Tensor) -> Tensor:  # [..., V], [...] -> [...]
    """`quantile_token` read off a full sort: the definition."""
    return _quantile_by_sort(logits, _integer_mass(logits), _noise(u, logits))


def quantile_interval(logits: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:  # [..., V], [...] -> [...], [...]
    """(F_l, F_r) of `token`, float64: the mass before it and up to it, by descending logit, ties by id. No sort.

    `quantile_token(logits, u) == token` exactly for the float64 numbers u in [F_l, F_r). The interval is empty for a
    token that the target can not emit: logit -inf, or a probability below 2^-44 of the largest one.

    Raises:
        ValueError: a row of `logits` that is no law.
    """
    token = token[..., None]
    mass = _integer_mass(logits)
    own = logits.gather(-1, token)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    before = (logits > own) | ((logits == own) & (ids < token))
    left = torch.where(before, mass, 0).sum(-1, keepdim=True)
    right = left + mass.gather(-1, token)
    return _share(left, mass).squeeze(-1), _share(right, mass).squeeze(-1)


def sampled_token(logits: Tensor, u: Tensor) -> Tensor:  # [..., V], [...] float64 in [0, 1) -> [...]
    """The target's own token at uniform noise `u`, by the inverse CDF in the order of ids.

    Raises:
        ValueError: a row of `logits` that is no law.
    """
    return draw(_lawful(logits.softmax(-1)), u)


def verify_greedy(draft_tokens: Tensor, target_logits: Tensor) -> Verdict:  # [..., K], [..., K+1, V]
    """Accept while draft = argmax of the target; emit the argmax. Non-finite rows behave as in `torch.argmax`."""
    _check_chain(draft_tokens, target_logits)
    return _verify_choices(draft_tokens, first_argmax(target_logits))


def verify_shared_noise(  # [..., K], [..., K+1, V], [..., K+1]
    draft_tokens: Tensor, target_logits: Tensor, u: Tensor
) -> Verdict:
    """The target picks `quantile_token` with the noise that the drafter saw; accept while draft = pick; emit the pick.

    `u` is uniform on [0, 1), one number per absolute position, drawn once per call. The u of positions after a
    rejection must be kept: the rejection depends on them through the draft, so redrawing them biases the law.
    """
    _check_chain(draft_tokens, target_logits)
    lawful = target_logits.amax(-1).isfinite()
    if not lawful.all():  # a broken row matters only where a token is emitted from it
        target_logits = target_logits.masked_fill(~lawful[..., None], 0.0)
    verdict = _verify_choices(draft_tokens, quantile_token(target_logits, u).where(lawful, -1))
    if (verdict.token < 0).any():
        raise ValueError(_NO_LAW)
    return verdict


def verify_rejection(  # [..., K], [..., K, V], [..., K+1, V]
    draft_tokens: Tensor, draft_probs: Tensor, target_logits: Tensor, generator: torch.Generator | None = None
) -> Verdict:
    """Accept y with probability min(1, p(y)/q(y)); emit from max(0, p - q), normalised, or from p if that has no mass.

    `draft_probs` is q, the law that each token was really drawn from. q(y) = 0 can not happen then; if it does, y is
    accepted where p(y) > 0, the limit of the rule.
    """
    if draft_probs.shape != (*draft_tokens.shape, target_logits.shape[-1]):
        raise ValueError(f"draft_probs must be {[*draft_tokens.shape, 'V']} for this draft, got {[*draft_probs.shape]}")
    return _verify_sampled(draft_tokens, draft_probs, target_logits, generator)


def verify_one_hot(  # [..., K], [..., K+1, V]
    draft_tokens: Tensor, target_logits: Tensor, generator: torch.Generator | None = None
) -> Verdict:
    """`verify_rejection` for drafts that are no samples, q one-hot: accept y with p(y); emit from p without y."""
    return _verify_sampled(draft_tokens, None, target_logits, generator)


def verify_children_greedy(children: Tensor, target_logits: Tensor) -> NodeVerdict:  # [..., C], [..., V]
    """Accept the child that is the target's argmax; emit the argmax. Children are distinct."""
    return _match_child(children, first_argmax(target_logits))


def verify_children_one_hot(  # [..., C], [..., V]
    children: Tensor, target_logits: Tensor, generator: torch.Generator | None = None
) -> NodeVerdict:
    """For children that are no samples, distinct: draw from p and see whether it is a child.

    The same law as trying them in turn with p(y) and zeroing each refused one, in one draw.
    """
    p = _lawful(target_logits.softmax(-1))
    return _match_child(children, draw(p, uniform(p.shape[:-1], p, generator)))


def verify_children(  # [..., C], [..., C, V], [..., V]
    children: Tensor, draft_probs: Tensor, target_logits: Tensor, generator: torch.Generator | None = None
) -> NodeVerdict:
    """Try the children in turn with min(1, p(y)/q_i(y)); after each refusal p <- max(0, p - q_i), normalised.

    `draft_probs[i]` is q_i, the law that child i was drawn from given the children before it (for distinct children:
    without them).
    """
    p = _lawful(target_logits.softmax(-1))
    u = uniform((*children.shape[:-1], children.shape[-1] + 1), p, generator)
    child = torch.full_like(children[..., 0], -1)
    for i, y in enumerate(children.unbind(-1)):
        q = draft_probs[..., i, :]
        accepted = (child < 0) & (u[..., i] * _at(q, y) < _at(p, y))
        child = torch.where(accepted, i, child)
        p = _residual(p, q)  # not read again once a child is accepted
    token = torch.where(child < 0, draw(p, u[..., -1]), _at(children, child.clamp(min=0)))
    return NodeVerdict(child, token)


_NO_LAW = (
    "target logits hold NaN or +inf, or nothing finite: no token can be drawn; check the target and the processors"
)


def _integer_mass(logits: Tensor) -> Tensor:  # [..., V] float -> [..., V] int64
    peak = logits.amax(-1, keepdim=True)
    if not peak.isfinite().all():
        raise ValueError(_NO_LAW)
    return (logits - peak).exp_().mul_(_UNIT).long()


def _noise(u: Tensor, logits: Tensor) -> Tensor:  # [...], [..., V] -> [...] float64
    if u.shape != logits.shape[:-1]:
        raise ValueError(f"u must be {[*logits.shape[:-1]]}, one number per row of logits, got {[*u.shape]}")
    if not ((u >= 0) & (u < 1)).all():
        raise ValueError("u must lie in [0, 1)")
    return u.double()


def _share(part: Tensor, mass: Tensor) -> Tensor:  # [..., n], [..., V] int64 -> [..., n] float64
    return part.double() / mass.sum(-1, keepdim=True).double()


def _quantile_by_sort(logits: Tensor, mass: Tensor, u: Tensor) -> Tensor:  # [..., V], [..., V], [...] -> [...]
    ids = logits.sort(dim=-1, descending=True, stable=True).indices
    right = _share(mass.gather(-1, ids).cumsum(-1), mass)  # ends with 1.0 > u
    return ids.gather(-1, torch.searchsorted(right, u[..., None], right=True)).squeeze(-1)


def _quantile_by_top_k(  # [R, V], [R, V], [R] -> [R], [R] bool: the tokens, and which of them are certain
    logits: Tensor, mass: Tensor, u: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(k)
    ids = ids.sort(dim=-1).values  # top-k leaves ties in any order: order the ids, then sort stably by logit
    ordered, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    right = _share(mass.gather(-1, ids).cumsum(-1), mass)
    at = torch.searchsorted(right, u[:, None], right=True)
    inside = at.clamp(max=k - 1)
    # tokens tied with the last logit may be missing from the top k: only those above it are certain
    settled = (at < k) & (ordered.gather(-1, inside) > values[:, -1:])
    return ids.gather(-1, inside).squeeze(-1), settled.squeeze(-1)


def _verify_choices(draft_tokens: Tensor, choices: Tensor) -> Verdict:  # [..., K], [..., K+1]
    num_accepted = (draft_tokens == choices[..., :-1]).cumprod(-1).sum(-1)  # [...]
    return Verdict(num_accepted, _at(choices, num_accepted))


def _verify_sampled(  # [..., K], [..., K, V] or None for one-hot, [..., K+1, V]
    draft_tokens: Tensor, draft_probs: Tensor | None, target_logits: Tensor, generator: torch.Generator | None
) -> Verdict:
    _check_chain(draft_tokens, target_logits)
    num_drafted, vocab_size = draft_tokens.shape[-1], target_logits.shape[-1]
    p = target_logits.softmax(-1)
    u = uniform(p.shape[:-1], p, generator)  # [..., K+1]: one for each test, one for the emitted token
    p_y = _at(p[..., :num_drafted, :], draft_tokens)
    q_y = torch.ones_like(p_y) if draft_probs is None else _at(draft_probs, draft_tokens)
    num_accepted = (u[..., :-1] * q_y < p_y).cumprod(-1).sum(-1)  # [...]
    p = _lawful(_row(p, num_accepted))  # [..., V]
    if num_drafted:
        last = num_accepted.clamp(max=num_drafted - 1)
        refused = F.one_hot(_at(draft_tokens, last), vocab_size) if draft_probs is None else _row(draft_probs, last)
        p = torch.where((num_accepted < num_drafted)[..., None], _residual(p, refused), p)
    return Verdict(num_accepted, draw(p, u[..., -1]))


def _match_child(children: Tensor, token: Tensor) -> NodeVerdict:  # [..., C], [...]
    index = torch.arange(children.shape[-1], device=children.device)
    return NodeVerdict(torch.where(children == token[..., None], index, -1).amax(-1), token)


def _residual(p: Tensor, q: Tensor) -> Tensor:  # [..., V], [..., V] -> [..., V]
    rest = (p - q).clamp_(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass.isfinite() & (mass > 0), rest / mass, p)


def _lawful(p: Tensor) -> Tensor:  # [..., V]; the softmax of a row that is no law is NaN everywhere
    if p[..., 0].isnan().any():
        raise ValueError(_NO_LAW)
    return p


def uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:  # float64
    """Numbers in [0, 1) on the device of `like`; generator: None is torch's global one."""
    place = like.device if generator is None else generator.device  # a generator draws on its own device only
    return torch.rand(shape, dtype=torch.float64, device=place, generator=generator).to(like.device)


def _at(x: Tensor, index: Tensor) -> Tensor:  # [..., n], [...] -> [...]
    return x.gather(-1, index[..., None]).squeeze(-1)


def _row(rows: Tensor, index: Tensor) -> Tensor:  # [..., R, V], [...] -> [..., V]
    start = torch.arange(index.numel(), device=index.device).view_as(index) * rows.shape[-2]
    return rows.reshape(-1, rows.shape[-1])[start + index]


def _check_chain(draft_tokens: Tensor, target_logits: Tensor) -> None:
    rows = (*draft_tokens.shape[:-1], draft_tokens.shape[-1] + 1)
    if target_logits.shape[:-1] != rows:
        raise ValueError(f"target_logits must be {[*rows, 'V']} for this draft, got {[*target_logits.shape]}")
