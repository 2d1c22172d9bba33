"""Every accept rule keeps the target's law: chi-square against exact enumeration, each harness shown able to fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from flashmap_hf.verification import (
    Verdict,
    draw,
    first_argmax,
    quantile_interval,
    quantile_token,
    quantile_token_reference,
    verify_children,
    verify_children_greedy,
    verify_children_one_hot,
    verify_greedy,
    verify_one_hot,
    verify_rejection,
    verify_shared_noise,
)

V, K, N = 4, 2, 3  # vocabulary, drafted tokens, tokens of a sample: 64 sequences to enumerate
SAMPLES = 40_000
RIGHT, WRONG = 1e-4, 1e-6  # p-values: a right rule stays above the first, a wrong one falls below the second
INF = float("inf")

# A toy autoregressive model: the logits after the last two tokens. [V, V, V]; a sample starts after the tokens 0, 0.


def random_table(seed: int) -> Tensor:
    logits = torch.randn(V, V, V, generator=torch.Generator().manual_seed(seed)) * 1.5
    return (logits * 2).round() / 2  # a coarse grid, so that some of the best tokens tie even at T = 0.01


def keep(table: Tensor, count: int) -> Tensor:
    """The `count` best tokens of each row, as a top-k processor leaves them."""
    ranks = table.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    return table.masked_fill(ranks >= count, -INF)


TARGET, NEAR, FAR = random_table(1), random_table(1) + 0.5 * random_table(2), random_table(3)
CASES = {  # target, drafter
    "near": (TARGET, NEAR),
    "far": (TARGET, FAR),
    "equal": (TARGET, TARGET),
    "draft with zeros": (TARGET, keep(FAR, 2)),
    "target with zeros": (keep(TARGET, 2), FAR),
    "both with zeros": (keep(TARGET, 2), keep(FAR, 2)),
    "draft certain": (TARGET, keep(FAR, 1)),
    "cold": (TARGET / 0.01, NEAR / 0.01),
    "cold target": (TARGET / 0.01, NEAR),
    "hot": (TARGET / 2, FAR / 2),
}
either_case = pytest.mark.parametrize("case", CASES)


def after(table: Tensor, prefix: Tensor) -> Tensor:  # [V, V, V], [B, n >= 2] -> [B, V]
    return table[prefix[:, -2], prefix[:, -1]]


def rows_of(table: Tensor, prefix: Tensor, draft: Tensor) -> Tensor:  # -> [B, K+1, V]
    text = torch.cat([prefix, draft], -1)
    start = prefix.shape[1]
    return torch.stack([after(table, text[:, : start + k]) for k in range(draft.shape[1] + 1)], 1)


def exact_law(table: Tensor) -> Tensor:  # -> [V^N] float64
    p = table.double().softmax(-1)
    law = p[0, 0]  # [V]
    law = law[:, None] * p[0]  # [V, V]
    for _ in range(N - 2):
        law = law[..., None] * p  # the last two tokens are the last two dimensions
    return law.reshape(-1)


def p_value(tokens: Tensor, law: Tensor) -> float:  # [B] cells, [cells]
    """Chi-square of the cells, those expected fewer than 10 times merged into one; 0 when an impossible one occurs."""
    counts = torch.bincount(tokens, minlength=len(law)).double()
    if counts[law == 0].any():
        return 0.0
    expected = law / law.sum() * len(tokens)
    small = expected < 10
    observed, wanted = counts[~small], expected[~small]
    if expected[small].sum() >= 10:
        observed = torch.cat([observed, counts[small].sum()[None]])
        wanted = torch.cat([wanted, expected[small].sum()[None]])
    if len(wanted) == 1:  # certain but for a handful of samples in all
        return 1.0 if len(tokens) - observed.item() < 50 else 0.0
    return float(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def worst_p_value(samples: Tensor, table: Tensor) -> float:  # [B, N]
    """The smallest p-value of the joint law of the N tokens and of the law of each one."""
    law = exact_law(table)
    place = V ** torch.arange(N - 1, -1, -1)
    values = [p_value((samples * place).sum(-1), law)]
    for n in range(N):
        others = [m for m in range(N) if m != n]
        values.append(p_value(samples[:, n], law.view(*[V] * N).sum(dim=others)))
    return min(values)


def sample_chain(one_round: Callable[[Tensor, Tensor], tuple[Tensor, Verdict]]) -> Tensor:  # -> [SAMPLES, N]
    """Rounds of drafting and verification until every sample has N tokens.

    `one_round(prefix [B, 2], position [B])` returns the draft [B, K] and the verdict on it.
    """
    text = torch.zeros(SAMPLES, 2 + N + K + 1, dtype=torch.long)
    length = torch.zeros(SAMPLES, dtype=torch.long)
    every = torch.arange(SAMPLES)
    while (length < N).any():
        at = length.clamp(max=N)  # finished samples go round idle: what they write lies behind their N tokens
        prefix = torch.stack([text[every, at], text[every, at + 1]], 1)
        draft, verdict = one_round(prefix, at)
        emitted = torch.cat([draft, verdict.token[:, None]], 1)
        emitted[every, verdict.num_accepted] = verdict.token
        for k in range(K + 1):
            text[every, at + 2 + k] = emitted[:, k]
        length = at + verdict.num_accepted + 1
    return text[:, 2 : 2 + N]


# --- rejection and one-hot ------------------------------------------------------------------------------------------


def rejection_samples(rule: Callable[..., Verdict], case: str, seed: int = 0) -> Tensor:
    target, drafter = CASES[case]
    generator = torch.Generator().manual_seed(seed)

    def one_round(prefix: Tensor, _: Tensor) -> tuple[Tensor, Verdict]:
        draft, laws = torch.empty(len(prefix), 0, dtype=torch.long), []
        for _ in range(K):
            laws.append(after(drafter, torch.cat([prefix, draft], 1)).softmax(-1))
            u = torch.rand(len(prefix), generator=generator, dtype=torch.float64)
            draft = torch.cat([draft, draw(laws[-1], u)[:, None]], 1)
        return draft, rule(draft, torch.stack(laws, 1), rows_of(target, prefix, draft), generator)

    return sample_chain(one_round)


def one_hot_samples(rule: Callable[..., Verdict], case: str, seed: int = 0) -> Tensor:
    target, drafter = CASES[case]
    generator = torch.Generator().manual_seed(seed)

    def one_round(prefix: Tensor, _: Tensor) -> tuple[Tensor, Verdict]:
        draft = torch.empty(len(prefix), 0, dtype=torch.long)
        for _ in range(K):
            draft = torch.cat([draft, after(drafter, torch.cat([prefix, draft], 1)).argmax(-1, keepdim=True)], 1)
        return draft, rule(draft, rows_of(target, prefix, draft), generator)

    return sample_chain(one_round)


def plain_verdict(accepted: Tensor, residual: Tensor, p: Tensor, generator: torch.Generator) -> Verdict:
    """The shared end of the wrong rules below, spelt out: [B, K], [B, K, V], [B, K+1, V]."""
    num_accepted = accepted.long().cumprod(-1).sum(-1)
    rest = torch.cat([residual, p[:, -1:]], 1)[torch.arange(len(p)), num_accepted]
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[torch.arange(len(p)), num_accepted])
    return Verdict(num_accepted, torch.multinomial(rest, 1, generator=generator).squeeze(-1))


def rejection_by_hand(
    draft: Tensor, q: Tensor, logits: Tensor, generator: torch.Generator, *, ratio: str = "p/q", rest: str = "p-q"
) -> Verdict:
    p = logits.softmax(-1)
    p_y, q_y = (x[:, :K].gather(-1, draft[..., None]).squeeze(-1) for x in (p, q))
    accept = {"p/q": p_y / q_y, "q/p": q_y / p_y, "p": p_y}[ratio]
    residual = {"p-q": (p[:, :K] - q).clamp(min=0), "p": p[:, :K]}[rest]
    return plain_verdict(torch.rand(p_y.shape, generator=generator) < accept, residual, p, generator)


def one_hot_by_hand(
    draft: Tensor, logits: Tensor, generator: torch.Generator, *, power: float = 1.0, rest: str = "without y"
) -> Verdict:
    p = logits.softmax(-1)
    p_y = p[:, :K].gather(-1, draft[..., None]).squeeze(-1)
    residual = {"without y": p[:, :K].scatter(-1, draft[..., None], 0.0), "p": p[:, :K]}[rest]
    return plain_verdict(torch.rand(p_y.shape, generator=generator) < p_y**power, residual, p, generator)


@either_case
def test_rejection_keeps_the_target_law(case: str) -> None:
    assert worst_p_value(rejection_samples(verify_rejection, case), CASES[case][0]) > RIGHT


@either_case
def test_one_hot_keeps_the_target_law(case: str) -> None:
    assert worst_p_value(one_hot_samples(verify_one_hot, case), CASES[case][0]) > RIGHT


@pytest.mark.parametrize("wrong", [{"ratio": "q/p"}, {"ratio": "p"}, {"rest": "p"}], ids=str)
def test_wrong_rejection_rules_fail(wrong: dict[str, str]) -> None:
    def rule(*args: Tensor) -> Verdict:
        return rejection_by_hand(*args, **wrong)

    assert worst_p_value(rejection_samples(rejection_by_hand, "far"), TARGET) > RIGHT
    assert worst_p_value(rejection_samples(rule, "far"), TARGET) < WRONG


def test_rejection_with_a_law_that_was_not_drawn_from_fails() -> None:
    """q must be the law after the processors: here the tokens come from a filtered q, and the plain q is reported."""

    def rule(draft: Tensor, _: Tensor, logits: Tensor, generator: torch.Generator) -> Verdict:
        return verify_rejection(draft, torch.full((len(draft), K, V), 1 / V), logits, generator)

    assert worst_p_value(rejection_samples(rule, "draft with zeros"), TARGET) < WRONG


@pytest.mark.parametrize("wrong", [{"power": 0.5}, {"rest": "p"}], ids=str)
def test_wrong_one_hot_rules_fail(wrong: dict[str, float | str]) -> None:
    def rule(*args: Tensor) -> Verdict:
        return one_hot_by_hand(*args, **wrong)

    assert worst_p_value(one_hot_samples(one_hot_by_hand, "far"), TARGET) > RIGHT
    assert worst_p_value(one_hot_samples(rule, "far"), TARGET) < WRONG


@pytest.mark.parametrize("case", ["near", "far", "target with zeros"])
def test_acceptance_rates_are_those_of_the_rules(case: str) -> None:
    """At the first position: sum of min(p, q) for rejection, p(y) for one-hot."""
    target, drafter = (table[0, 0] for table in CASES[case])
    p, q = target.double().softmax(-1), drafter.double().softmax(-1)
    logits = target.expand(SAMPLES, 2, V)
    generator = torch.Generator().manual_seed(5)
    u = torch.rand(SAMPLES, generator=generator, dtype=torch.float64)
    draft = draw(q.expand(SAMPLES, V), u)[:, None]
    rejection = verify_rejection(draft, q.float().expand(SAMPLES, 1, V), logits, generator)
    one_hot = verify_one_hot(drafter.argmax().expand(SAMPLES, 1), logits, generator)
    for verdict, rate in ((rejection, torch.minimum(p, q).sum()), (one_hot, p[drafter.argmax()])):
        assert p_value(verdict.num_accepted, torch.stack([1 - rate, rate])) > RIGHT


# --- shared noise ---------------------------------------------------------------------------------------------------


def shared_noise_samples(case: str, *, redraw: bool = False, seed: int = 0, warp: float = 1.0) -> Tensor:
    """A drafter that sees the noise of the whole block, as one with bidirectional attention does.

    It knows the target's choice, and spoils it where the noise of the *next* position is large. `redraw` draws new
    noise behind a rejection; `warp` != 1 makes u non-uniform.
    """
    target, drafter = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    every, ahead = torch.arange(SAMPLES), torch.arange(K + 1)

    def noise(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64) ** warp

    u = noise(SAMPLES, N + K + 1)  # by absolute position

    def one_round(prefix: Tensor, position: Tensor) -> tuple[Tensor, Verdict]:
        at = (every[:, None], position[:, None] + ahead)  # [B, K+1]
        block = u[at]
        draft = torch.empty(SAMPLES, 0, dtype=torch.long)
        for k in range(K):
            text = torch.cat([prefix, draft], 1)
            good, bad = (quantile_token(after(table, text), block[:, k]) for table in (target, drafter))
            bad = torch.where(bad == good, (good + 1) % V, bad)
            draft = torch.cat([draft, torch.where(block[:, k + 1] < 0.5, good, bad)[:, None]], 1)
        verdict = verify_shared_noise(draft, rows_of(target, prefix, draft), block)
        if redraw:
            behind = ahead > verdict.num_accepted[:, None]
            u[at] = torch.where(behind, noise(SAMPLES, K + 1), block)
        return draft, verdict

    return sample_chain(one_round)


@either_case
def test_shared_noise_keeps_the_target_law(case: str) -> None:
    assert worst_p_value(shared_noise_samples(case), CASES[case][0]) > RIGHT


def test_redrawing_the_noise_behind_a_rejection_fails() -> None:
    """The rejection depends on the noise behind it, through the draft: what survives is no longer uniform."""
    assert worst_p_value(shared_noise_samples("far", redraw=True), TARGET) < WRONG


def test_shared_noise_that_is_not_uniform_fails() -> None:
    assert worst_p_value(shared_noise_samples("far", warp=1.1), TARGET) < WRONG


# --- children of a tree node ----------------------------------------------------------------------------------------


def tree_samples(node: Callable[[Tensor, Tensor, torch.Generator], Tensor], seed: int = 0) -> Tensor:
    """A walk down a tree: `node(prefix, text so far, generator)` emits the next token, a child or not."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.zeros(SAMPLES, 2, dtype=torch.long)
    for _ in range(N):
        text = torch.cat([text, node(text, generator)[:, None]], 1)
    return text[:, 2:]


def drawn_children(table: Tensor, prefix: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Distinct children in turn, each from q without those before it: tokens [B, C] and their laws [B, C, V]."""
    logits = after(table, prefix)
    children, laws = [], []
    for _ in range(count):
        laws.append(logits.softmax(-1))
        children.append(draw(laws[-1], torch.rand(len(prefix), generator=generator, dtype=torch.float64)))
        logits = logits.scatter(-1, children[-1][:, None], -INF)
    return torch.stack(children, 1), torch.stack(laws, 1)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("case", [case for case in CASES if case != "draft certain"])
def test_children_keep_the_target_law(case: str, count: int) -> None:
    target, drafter = CASES[case]
    count = min(count, 2) if "zeros" in case else count  # a drafter of two tokens has two children

    def node(prefix: Tensor, generator: torch.Generator) -> Tensor:
        children, laws = drawn_children(drafter, prefix, count, generator)
        verdict = verify_children(children, laws, after(target, prefix), generator)
        accepted = verdict.child >= 0
        assert (children.gather(-1, verdict.child.clamp(min=0)[:, None])[:, 0] == verdict.token)[accepted].all()
        return verdict.token

    assert worst_p_value(tree_samples(node), target) > RIGHT


@either_case
def test_one_hot_children_keep_the_target_law(case: str) -> None:
    target, drafter = CASES[case]

    def node(prefix: Tensor, generator: torch.Generator) -> Tensor:
        children = after(drafter, prefix).topk(2).indices
        return verify_children_one_hot(children, after(target, prefix), generator).token

    assert worst_p_value(tree_samples(node), target) > RIGHT


@pytest.mark.parametrize("wrong", ["p never reduced", "same q for every child", "p at the end"])
def test_wrong_children_rules_fail(wrong: str) -> None:
    def node(prefix: Tensor, generator: torch.Generator) -> Tensor:
        children, laws = drawn_children(FAR, prefix, 2, generator)
        logits = after(TARGET, prefix)
        if wrong == "same q for every child":
            return verify_children(children, laws[:, :1].expand_as(laws), logits, generator).token
        if wrong == "p at the end":
            verdict = verify_children(children, laws, logits, generator)
            fresh = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
            return torch.where(verdict.child < 0, fresh, verdict.token)
        tries = [verify_children(children[:, i : i + 1], laws[:, i : i + 1], logits, generator) for i in (0, 1)]
        return torch.where(tries[0].child == 0, tries[0].token, tries[1].token)

    assert worst_p_value(tree_samples(node), TARGET) < WRONG


def test_one_hot_children_are_accepted_as_if_tried_in_turn() -> None:
    """Child i with p(c_i); none with what is left."""
    logits = TARGET[1, 2]
    children = torch.tensor([3, 1])
    p = logits.double().softmax(-1)
    generator = torch.Generator().manual_seed(3)
    drawn = verify_children_one_hot(children.expand(SAMPLES, 2), logits.expand(SAMPLES, V), generator)
    in_turn = verify_children(
        children.expand(SAMPLES, 2),
        torch.nn.functional.one_hot(children, V).float().expand(SAMPLES, 2, V),
        logits.expand(SAMPLES, V),
        generator,
    )
    law = torch.stack([1 - p[children].sum(), *p[children]])
    for verdict in (drawn, in_turn):
        assert p_value(verdict.child + 1, law) > RIGHT
        assert p_value(verdict.token, p) > RIGHT


def test_greedy_children() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [0.0, 2.0, 2.0], [3.0, 2.0, 2.0]])
    verdict = verify_children_greedy(torch.tensor([[2, 1], [0, 2], [0, 1]]), logits)
    assert verdict.child.tolist() == [1, -1, 0]
    assert verdict.token.tolist() == [1, 1, 0]


# --- properties -----------------------------------------------------------------------------------------------------

# Few levels, so that ties are common; -inf as filters leave it.
levels = st.sampled_from([-INF, -200.0, -30.0, -1.0, -0.0, 0.0, 0.5, 0.5 + 2**-24, 1.0])


@st.composite
def law_rows(draw_from: st.DrawFn, rows: int | None = None) -> Tensor:
    """Logits [rows, vocabulary], each row with a finite entry; small vocabularies and ones past the first top-k."""
    rows = rows or draw_from(st.integers(1, 4))
    size = draw_from(st.integers(1, 9))
    logits = torch.tensor(draw_from(st.lists(levels, min_size=rows * size, max_size=rows * size))).view(rows, size)
    logits[:, draw_from(st.integers(0, size - 1))].clamp_(min=-1.0)
    repeats = draw_from(st.sampled_from([1, 1, 30, 600]))
    logits = logits.repeat(1, repeats)
    if draw_from(st.booleans()):
        generator = torch.Generator().manual_seed(draw_from(st.integers(0, 999)))
        logits = logits + torch.randn(logits.shape, generator=generator) * draw_from(st.sampled_from([0.1, 3.0]))
    return logits


unit = st.one_of(
    st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 5e-324, 0.5, 1 - 2**-24, 1 - 2**-40, 1 - 2**-53])
)


@settings(deadline=None)
@given(law_rows(), st.data())
def test_fast_quantile_equals_the_sort(logits: Tensor, data: st.DataObject) -> None:
    u = torch.tensor(data.draw(st.lists(unit, min_size=len(logits), max_size=len(logits))), dtype=torch.float64)
    token = quantile_token(logits, u)
    assert torch.equal(token, quantile_token_reference(logits, u))
    assert logits.gather(-1, token[:, None]).isfinite().all()


@settings(deadline=None)
@given(law_rows(), st.data())
def test_quantile_interval_is_where_the_token_is_picked(logits: Tensor, data: st.DataObject) -> None:
    u = torch.tensor(data.draw(st.lists(unit, min_size=len(logits), max_size=len(logits))), dtype=torch.float64)
    token = quantile_token(logits, u)
    left, right = quantile_interval(logits, token)
    assert ((left <= u) & (u < right)).all()
    last = torch.nextafter(right, torch.zeros(()).double())
    for inside in (left, (left + (right - left) / 2).minimum(last), last):
        assert torch.equal(quantile_token(logits, inside), token)
    assert not (quantile_token(logits, right.clamp(max=1 - 2**-53)) == token)[right < 1].any()


@settings(deadline=None)
@given(law_rows(rows=1))
def test_quantile_intervals_tile_the_unit_interval(logits: Tensor) -> None:
    logits = logits[:, :100]
    size = logits.shape[1]
    left, right = quantile_interval(logits.expand(size, size), torch.arange(size))
    order = logits[0].sort(descending=True, stable=True).indices
    assert left[order[0]] == 0
    assert right[order[-1]] == 1
    assert torch.equal(left[order[1:]], right[order[:-1]])
    assert (right == left)[logits[0].isinf()].all()
    torch.testing.assert_close(right - left, logits[0].double().softmax(-1), rtol=1e-5, atol=1e-12)


@settings(deadline=None)
@given(law_rows(), st.data())
def test_zero_noise_is_greedy(logits: Tensor, data: st.DataObject) -> None:
    size = logits.shape[1]
    zeros = torch.zeros(len(logits), dtype=torch.float64)
    assert torch.equal(quantile_token(logits, zeros), logits.argmax(-1))
    draft = torch.tensor(
        data.draw(st.lists(st.integers(0, size - 1), min_size=len(logits) - 1, max_size=len(logits) - 1))
    )
    draft = draft.long()
    greedy, shared = verify_greedy(draft, logits), verify_shared_noise(draft, logits, zeros)
    assert (greedy.num_accepted, greedy.token) == (shared.num_accepted, shared.token)


@settings(deadline=None)
@given(law_rows(), st.booleans())
def test_first_argmax_is_torch_argmax(logits: Tensor, broken: bool) -> None:
    if broken:
        logits[:, -1] = float("nan")
        logits[0] = -INF
    assert torch.equal(first_argmax(logits), logits.argmax(-1))


@settings(deadline=None)
@given(law_rows(), st.integers(0, 2**32), st.data())
def test_chain_rules_against_a_plain_loop(logits: Tensor, seed: int, data: st.DataObject) -> None:
    """Greedy: the loop anyone would write. Sampling: legal counts and tokens; one-hot is rejection with a one-hot q."""
    num_drafted, size = len(logits) - 1, logits.shape[1]
    generator = torch.Generator().manual_seed(seed)
    best = logits.argmax(-1)
    picks = data.draw(st.lists(st.integers(-1, size - 1), min_size=num_drafted, max_size=num_drafted))
    draft = torch.tensor([best[k].item() if y < 0 else y for k, y in enumerate(picks)], dtype=torch.long)

    expected = 0
    while expected < num_drafted and draft[expected] == logits[expected].argmax():
        expected += 1
    verdict = verify_greedy(draft, logits)
    assert verdict.num_accepted == expected
    assert verdict.token == logits[expected].argmax()

    one_hot = torch.nn.functional.one_hot(draft, size).float()
    u = torch.rand(num_drafted + 1, generator=generator, dtype=torch.float64)
    q = torch.rand(num_drafted, size, generator=generator).softmax(-1)
    verdicts = [
        verify_shared_noise(draft, logits, u),
        verify_rejection(draft, q, logits, torch.Generator().manual_seed(seed)),
        verify_rejection(draft, one_hot, logits, torch.Generator().manual_seed(seed)),
        verify_one_hot(draft, logits, torch.Generator().manual_seed(seed)),
    ]
    for verdict in verdicts:
        n = int(verdict.num_accepted)
        assert 0 <= n <= num_drafted
        assert logits[torch.arange(n), draft[:n]].isfinite().all()  # what the target excludes never stands
        assert logits[n, verdict.token].isfinite()
    assert (verdicts[2].num_accepted, verdicts[2].token) == (verdicts[3].num_accepted, verdicts[3].token)


def test_rejection_never_emits_the_refused_token() -> None:
    logits, q = TARGET[0, :3], FAR[0, :2].softmax(-1)
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(300):
        draft = draw(q, torch.rand(2, generator=generator, dtype=torch.float64))
        for verdict in (verify_rejection(draft, q, logits, generator), verify_one_hot(draft, logits, generator)):
            n = int(verdict.num_accepted)
            if n < 2:
                refused += 1
                assert verdict.token != draft[n]
    assert refused > 100


# --- batches, randomness, bad input ---------------------------------------------------------------------------------


def test_batched_rows_equal_single_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, K + 1, 100, generator=generator) * 3
    u = torch.rand(5, 3, K + 1, generator=generator, dtype=torch.float64) ** 2
    draft = quantile_token(logits, u)[..., :K].clone()
    draft[1, :, 0], draft[2, :, 1] = 7, 8
    for rule in (lambda d, x, v: verify_greedy(d, x), verify_shared_noise):
        verdict = rule(draft, logits, u)
        for b in range(5):
            for c in range(3):
                single = rule(draft[b, c], logits[b, c], u[b, c])
                assert single.num_accepted == verdict.num_accepted[b, c]
                assert single.token == verdict.token[b, c]


def random_calls() -> dict[str, Callable[[torch.Generator | None], Tensor]]:
    logits, q, draft = TARGET[0, :3], FAR[0, :2].softmax(-1), torch.tensor([1, 2])
    unlikely, uniform = logits[0].argsort()[:2], torch.full((2, V), 1 / V)  # refused now and then
    calls = {
        "rejection": lambda generator: verify_rejection(draft, q, logits, generator),
        "one-hot": lambda generator: verify_one_hot(draft, logits, generator),
        "children": lambda generator: verify_children(unlikely, uniform, logits[0], generator),
        "one-hot children": lambda generator: verify_children_one_hot(draft, logits[0], generator),
    }
    return {name: lambda generator, call=call: call(generator).token for name, call in calls.items()}


@pytest.mark.parametrize("name", random_calls())
def test_global_randomness(name: str) -> None:
    """The same torch seed gives the same tokens, nothing reseeds, and an own generator leaves the global one alone."""
    call = random_calls()[name]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        first = [int(call(None)) for _ in range(60)]
        state = torch.get_rng_state()
        torch.manual_seed(11)
        assert [int(call(None)) for _ in range(60)] == first
        assert torch.equal(torch.get_rng_state(), state)
        assert len(set(first)) > 1  # a reseeding rule would repeat itself

        generator = torch.Generator().manual_seed(11)
        assert [int(call(generator)) for _ in range(60)] == first
        assert torch.equal(torch.get_rng_state(), state)


def test_deterministic_rules_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    draft, u = torch.tensor([1, 2]), torch.tensor([0.3, 0.6, 0.9])
    verify_greedy(draft, TARGET[0, :3])
    verify_shared_noise(draft, TARGET[0, :3], u)
    verify_children_greedy(draft, TARGET[0, 0])
    assert torch.equal(torch.get_rng_state(), state)


def test_inputs_are_not_changed() -> None:
    draft, logits, q, u = torch.tensor([1, 2]), TARGET[0, :3].clone(), FAR[0, :2].softmax(-1), torch.rand(3)
    before = [x.clone() for x in (draft, logits, q, u)]
    verify_greedy(draft, logits)
    verify_rejection(draft, q, logits)
    verify_one_hot(draft, logits)
    verify_shared_noise(draft, logits, u)
    verify_children(draft, q, logits[0])
    verify_children_one_hot(draft, logits[0])
    quantile_interval(logits[:2], draft)
    draw(q, u[:2])
    assert all(torch.equal(x, y) for x, y in zip(before, (draft, logits, q, u), strict=True))


def chain_rules(q: Tensor) -> list[Callable[[Tensor, Tensor], Verdict]]:
    return [
        lambda draft, logits: verify_rejection(draft, q[: len(draft)], logits),
        lambda draft, logits: verify_one_hot(draft, logits),
        lambda draft, logits: verify_shared_noise(draft, logits, torch.full((len(draft) + 1,), 0.5)),
    ]


@pytest.mark.parametrize("broken", [float("nan"), INF, -INF], ids=["NaN", "+inf", "nothing finite"])
@pytest.mark.parametrize("rule", range(3))
def test_a_broken_target_row_raises_only_where_a_token_comes_from_it(rule: int, broken: float) -> None:
    certain = torch.tensor([[50.0, 0.0, 0.0]] * 3)
    verify = chain_rules(torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]))[rule]
    logits = certain.clone()
    logits[1, :] = broken
    with pytest.raises(ValueError, match="NaN or \\+inf, or nothing finite"):
        verify(torch.tensor([0, 0]), logits)  # the first is accepted, the second is checked against the broken row
    logits = certain.clone()
    logits[2, :] = broken
    assert verify(torch.tensor([0, 1]), logits).num_accepted == 1  # refused: the bonus row is never read
    with pytest.raises(ValueError, match="NaN or \\+inf, or nothing finite"):
        verify_children_one_hot(torch.tensor([0]), logits[2])
    with pytest.raises(ValueError, match="NaN or \\+inf, or nothing finite"):
        verify_children(torch.tensor([0]), certain[:1].softmax(-1), logits[2])


def test_greedy_follows_argmax_on_nan() -> None:
    logits = torch.tensor([[0.0, float("nan"), 2.0], [0.0, 1.0, 0.0]])
    verdict = verify_greedy(torch.tensor([1]), logits)
    assert (verdict.num_accepted, verdict.token) == (1, 1)


def test_nothing_drafted_emits_the_target_token() -> None:
    none, logits = torch.empty(0, dtype=torch.long), torch.tensor([[-INF, 3.0, -INF]])
    verdicts = [verify_greedy(none, logits), *(verify(none, logits) for verify in chain_rules(torch.empty(0, 3)))]
    assert [(int(v.num_accepted), int(v.token)) for v in verdicts] == [(0, 1)] * 4


def test_a_draft_law_that_denies_its_token() -> None:
    """q(y) = 0: accepted where p(y) > 0, refused where p(y) = 0 too."""
    logits = torch.tensor([[0.0, 0.0, -INF], [0.0, -INF, -INF]])
    q = torch.tensor([[1.0, 0.0, 0.0]])
    assert verify_rejection(torch.tensor([1]), q, logits).num_accepted == 1
    refused = verify_rejection(torch.tensor([2]), q, logits)
    assert (refused.num_accepted, refused.token) == (0, 1)


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    """Here q >= p everywhere: q is no law, as a rounded one may not be, and its residual is empty."""
    logits = torch.tensor([[0.0, 0.0, -INF]] * 2)
    q = torch.tensor([[0.5, 0.5, 1.0]])
    nan = torch.full((1, 3), float("nan"))
    for law in (q, nan):
        seen = {int(verify_rejection(torch.tensor([2]), law, logits).token) for _ in range(50)}
        assert seen == {0, 1}


@pytest.mark.parametrize("u", [1 - 2**-24, 1 - 2**-53, 0.0])
def test_draw_never_leaves_the_support(u: float) -> None:
    weights = torch.zeros(50_000)
    weights[100:40_000] = 1e-30 * torch.rand(39_900).clamp(min=1e-3)
    token = draw(weights, torch.tensor(u, dtype=torch.float64))
    assert 100 <= token < 40_000
    assert draw(weights.double(), torch.tensor(u, dtype=torch.float64)) == token


@pytest.mark.parametrize("case", ["far", "target with zeros", "hot"])
def test_draw_and_quantile_token_have_the_law(case: str) -> None:
    logits = CASES[case][0][2, 1]
    law = logits.double().softmax(-1)
    u = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert p_value(draw(logits.softmax(-1).expand(SAMPLES, V), u), law) > RIGHT
    assert p_value(quantile_token(logits.expand(SAMPLES, V), u), law) > RIGHT
    assert p_value(draw(logits.softmax(-1).expand(SAMPLES, V), u**1.2), law) < WRONG
    assert p_value(quantile_token(logits.expand(SAMPLES, V), u**1.2), law) < WRONG


def test_bad_input_is_named() -> None:
    draft, logits = torch.tensor([1, 2]), TARGET[0, :3]
    with pytest.raises(ValueError, match="target_logits must be \\[3, 'V'\\]"):
        verify_greedy(draft, logits[:2])
    with pytest.raises(ValueError, match="draft_probs must be \\[2, 'V'\\]"):
        verify_rejection(draft, torch.full((3, V), 0.25), logits)
    with pytest.raises(ValueError, match="u must be \\[3\\]"):
        verify_shared_noise(draft, logits, torch.zeros(2))
    for outside in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="u must lie in \\[0, 1\\)"):
            quantile_token(logits[0], torch.tensor(outside))
    for broken in (float("nan"), INF, -INF):
        with pytest.raises(ValueError, match="NaN or \\+inf, or nothing finite"):
            quantile_interval(torch.full((1, V), broken), torch.tensor([0]))
