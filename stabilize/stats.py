"""What is measured, apart from when: pure functions on tensors and modules, tested against closed forms.

Every function returns tensors and copies nothing to the host, so that a caller can put many results into one transfer.
Results are float64 where the device has it, because a vanishing gradient is what these numbers are there to show: the
square of 1e-20 is zero in float32.

A number that does not exist (a layer without gradient, a similarity over no position) is NaN, never a made-up zero.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

NUMBERS_AT_ONCE = 2**19  # bounds the temporary copies of `similarity_sums` and `rolling_deviations`


# ---------------------------------------------------------------- gradients and updates


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on Apple's devices, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def gradient_norms(modules: Sequence[nn.Module], known: Mapping[Tensor, Tensor] | None = None) -> Tensor:
    """L2 norm of the gradient of all parameters of each module, as `[modules]`.

    ``|g| = sqrt(sum over parameters of sum(g ** 2))``. A parameter in two of the modules counts in both and is read
    once. Parameters whose gradient is None are left out; a module without any gradient is NaN.

    Args:
        modules: whose parameters.
        known: norms of single gradients, by parameter, that need not be taken again.
    """
    groups = [[p for p in module.parameters() if p.grad is not None] for module in modules]
    norms = dict(known or {})
    gradients = {p: p.grad for group in groups for p in group if p.grad is not None and p not in norms}
    if gradients:
        norms |= zip(gradients, whole(norm_of_each(list(gradients.values()))).unbind(), strict=True)
    return _together(groups, norms)


def _together(groups: Sequence[Sequence[nn.Parameter]], norms: Mapping[Tensor, Tensor]) -> Tensor:
    """L2 norm of each group from those of its parameters, as `[groups]`; NaN of a group of none."""
    rows = [[norms[parameter] for parameter in group] for group in groups]
    there = [norm for row in rows for norm in row]
    if not there:
        return torch.full((len(rows),), math.nan)
    together = torch._foreach_norm(torch.split(torch.stack(there), [len(row) for row in rows]))
    return torch.stack([norm if row else norm.new_full((), math.nan) for norm, row in zip(together, rows, strict=True)])


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether ranks have a part each (FSDP2); whoever has such a tensor has imported its module, half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def norm_of_each(tensors: list[Tensor]) -> Tensor:
    """L2 norm of each tensor by itself, as `[tensors]`, in float64 where the device has it; sharded as they are.

    On a CPU float64 takes eight times as long, and a look at a number nothing: there only the norms whose squares
    float32 may have lost are taken again.
    """
    device = tensors[0].device
    wide = wide_dtype(device)
    if any(is_sharded(t) or t.device.type != "cpu" or t.dtype == torch.float64 for t in tensors):
        sharded = all(map(is_sharded, tensors))
        each = torch._foreach_norm(tensors, 2, dtype=wide)
        return torch.stack([(norm if sharded else whole(norm)).to(device) for norm in each])
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).to(wide)
    for number in ((norms > 1e-12) & (norms < 1e18)).logical_not().nonzero().flatten().tolist():
        norms[number] = torch.linalg.vector_norm(tensors[number], dtype=wide)
    return norms


def whole(norm: Tensor) -> Tensor:
    """A norm over all shards, where the tensor is sharded (FSDP2): every rank has to ask, and gets the same."""
    return norm.full_tensor() if is_sharded(norm) else norm


def local(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this process has, in the tensor's own memory; all of it where it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def squared_norm(tensor: Tensor) -> Tensor:
    """``sum(x ** 2)``, a scalar: squares add over tensors, micro-batches and ranks where norms do not."""
    return torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor.device)).square()


def gradient_ratio(norms: Tensor) -> Tensor:
    """Norm of every layer but the last over the last layer's: ``[layers] -> [layers - 1]``, ``|g_l| / |g_L|``.

    NaN where the last layer's norm is zero, infinite or missing.
    """
    last = norms[-1]
    return torch.where((last > 0) & last.isfinite(), norms[:-1] / last, math.nan)


def update_ratios(modules: Sequence[nn.Module], before: Mapping[Tensor, Tensor]) -> Tensor:
    """How far each module's parameters have moved, over where they were: ``|W' - W| / |W|``, as `[modules]`.

    Both norms are those of all parameters of the module together. Parameters that need no gradient are left out; a
    module without any other, or whose parameters were all zero, is NaN.

    Args:
        modules: as they are now, after the update.
        before: a copy of each parameter before it, which is used up.
    """
    groups = [[p for p in module.parameters() if p.requires_grad] for module in modules]
    size: dict[Tensor, Tensor] = {}
    step: dict[Tensor, Tensor] = {}
    for group in groups:  # one at a time, whose weights stay in the processor's cache
        new = [p for p in group if p not in size]
        if new:
            olds = [before[p] for p in new]
            size.update(zip(new, whole(norm_of_each(olds)).unbind(), strict=True))
            torch._foreach_sub_(olds, [p.detach() for p in new])
            step.update(zip(new, whole(norm_of_each(olds)).unbind(), strict=True))
    sizes, steps = _together(groups, size), _together(groups, step)
    return torch.where(sizes > 0, steps / sizes, math.nan)


def adam_health(optimizer: Optimizer) -> Tensor:
    """Median over all weights of Adam's ``sqrt(v / (1 - beta2^t)) / eps``, a scalar; near one, eps slows the weights.

    Of every optimiser that keeps `exp_avg_sq` and `step` (Adam, AdamW, NAdam, RAdam, ...); NaN of any other, and before
    its first step. A weight whose gradient was always zero is left out: it moves nowhere whatever eps is.
    """
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "exp_avg_sq" in state:
                moment = state["exp_avg_sq"].detach()
                correction = 1 - group["betas"][1] ** float(state["step"])
                found.append((moment[moment > 0] / correction).sqrt() / group["eps"])
    together = torch.cat(found) if found else torch.empty(0)
    return together.median() if together.numel() else torch.tensor(math.nan)


# ---------------------------------------------------------------- states


def moments(states: Tensor, real: Tensor | None = None) -> Tensor:
    """How many numbers the real positions of `[..., width]` hold, their sum and that of their squares, as `[3]`.

    All three add over micro-batches and ranks; `rms` and `variance` read the total. `real` bool `[...]`, None is all.
    Within a position sums are float32, a hundred times faster: sizes from 1e-19 to 1e19 can be told.
    """
    states = states.detach().to(torch.promote_types(states.dtype, torch.float32))
    wide = wide_dtype(states.device)
    total, norm = states.sum(-1).to(wide), torch.linalg.vector_norm(states, dim=-1).to(wide)
    rows = torch.stack([torch.full_like(total, states.size(-1)), total, norm.square()])
    return (rows if real is None else torch.where(real, rows, 0.0)).flatten(1).sum(1)


def rms(moments: Tensor) -> Tensor:
    """``sqrt(mean(x ** 2))`` from `moments`: `[..., 3] -> [...]`; NaN where nothing was counted."""
    count, _, squares = moments.unbind(-1)
    return (squares / count).sqrt()


def variance(moments: Tensor) -> Tensor:
    """``mean(x ** 2) - mean(x) ** 2`` from `moments`: `[..., 3] -> [...]`; NaN where nothing was counted."""
    count, total, squares = moments.unbind(-1)
    return (squares / count - (total / count).square()).clamp(min=0.0)


def activation_rms(states: Tensor, real: Tensor | None = None) -> Tensor:
    """``sqrt(mean(x ** 2))`` over the real positions of `[..., width]`, a scalar; `real` bool `[...]`, None is all."""
    return rms(moments(states, real))


def growth_slope(variances: Tensor) -> Tensor:
    """By how much ``log variance`` grows from layer to layer: `[layers] ->` the slope of the least-squares line.

    Zero where all layers have one scale, as after post-norm; falling with depth where the variance grows linearly, as
    under pre-norm; the same at any depth where it grows exponentially (Sun et al. 2025, arXiv:2502.05795). A layer
    whose logarithm does not exist is left out; NaN where fewer than two are left.
    """
    logs = variances.log()
    exists = logs.isfinite()
    number = torch.arange(1, len(logs) + 1, dtype=logs.dtype, device=logs.device)
    number, logs = (torch.where(exists, x, 0.0) for x in (number, logs))
    number = torch.where(exists, number - number.sum() / exists.sum(), 0.0)
    return (number * logs).sum() / number.square().sum()


def branch_share(branch: Tensor, total: Tensor, real: Tensor | None = None) -> Tensor:
    """``Var f / Var(x ⊕ f)`` over real positions, a scalar: how much of the stream a branch has written.

    What Admin calls the dependency on a branch (Liu et al. 2020, arXiv:2004.08249).

    Args:
        branch: f, `[..., width]`.
        total: the stream after f was added, the same shape.
        real: bool `[...]`, None is all.
    """
    return variance(moments(branch, real)) / variance(moments(total, real))


def layer_norm_variance(output: Tensor, epsilon: float) -> Tensor | None:
    """The variance that a layer norm has divided by, one a position `[..., 1]`, from what autograd keeps of it.

    Costs next to nothing, where to take the variance again would read every state three times. None where `output` does
    not come from `torch.nn.functional.layer_norm` alone, but for a change of precision, or has no graph.
    """
    node = output.grad_fn
    while node is not None and node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    if node is None or node.name() != "NativeLayerNormBackward0":
        return None
    inverse_deviation: Tensor = node._saved_result2  # type: ignore[attr-defined]
    return (inverse_deviation.pow(-2) - epsilon).clamp(min=0.0)


def near_epsilon(guarded: Tensor, epsilon: float, real: Tensor | None = None, times: float = 10.0) -> Tensor:
    """At how many real positions epsilon has a say, and of how many: `[2]`, which add over micro-batches and ranks.

    Args:
        guarded: what epsilon is added to, one number a position: a variance, a mean square.
        epsilon: of the norm.
        real: bool of the same shape, None is all.
        times: epsilon has a say up to this many times its size.
    """
    near = guarded.detach() <= times * epsilon
    counted = torch.ones_like(near) if real is None else real.expand_as(near)
    return torch.stack([(near & counted).sum(), counted.sum()]).to(wide_dtype(near.device))


# ---------------------------------------------------------------- similarity


def similarity_sums(
    states: Sequence[Tensor],
    real: Tensor | None = None,
    over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Sums of the cosine between the outputs of all pairs of layers, and how many positions they run over.

    Both add over micro-batches and ranks; `similarity_matrix` turns the total into means.

    Args:
        states: one tensor a layer, all of one shape `[..., width]`.
        real: bool `[...]`, the positions that count; None is all of them. A position where either layer's state is zero
            does not count for that pair.
        over_ranks: adds a tensor over all ranks, each of which has to ask; the mean is then that of all of them.

    Returns:
        `[2, 2, layers, layers]`: of the states as they are, then of what is left of them when each layer's mean over
        the real positions, which all tokens share, is taken out; of each the sums, then the counts.

    Raises:
        ValueError: if the shapes differ.
    """
    if len({state.shape for state in states}) > 1:
        raise ValueError(f"layers of different shape cannot be compared: {[tuple(state.shape) for state in states]}")
    flat = [state.detach().flatten(0, -2) for state in states]
    mask = flat[0].new_ones(len(flat[0]), dtype=torch.bool) if real is None else real.flatten()
    total = torch.zeros(len(flat), 2, flat[0].size(-1), device=mask.device, dtype=wide_dtype(mask.device))
    for vectors, real in _parts(flat, mask):
        total.index_add_(1, real.long(), vectors)  # padding apart: three times as fast as to write zeros there
    total = torch.cat([total[:, 1].flatten(), mask.sum().to(total)[None]])
    total = total if over_ranks is None else over_ranks(total)
    mean = (total[:-1] / total[-1].clamp(min=1)).view(len(flat), -1)
    between_means = mean @ mean.T
    rounding = 64 * torch.finfo(mean.dtype).eps ** 0.5 * between_means.diagonal().sqrt()  # of wide inner products
    plain, centered = torch.zeros(2, 2, len(flat), len(flat), device=mask.device, dtype=total.dtype)
    for vectors, real in _parts(flat, mask):
        products = torch.einsum("lpw,mpw->plm", vectors, vectors)
        plain += _cosines(products, real, torch.zeros_like(rounding))
        with_mean = (vectors @ mean.T).transpose(0, 1)  # (x - a)(y - b) = xy - xb - ay + ab
        centered += _cosines(products - with_mean - with_mean.mT + between_means, real, rounding)
    return torch.stack([plain, centered])


def _cosines(products: Tensor, real: Tensor, least: Tensor) -> Tensor:
    """Sums and counts, `[2, layers, layers]`, from inner products of the layers, `[positions, layers, layers]`.

    A vector no longer than `least`, `[layers]`, has no direction. Products where there is no real position become zero.
    """
    norms = products.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt()
    counts = (real.unsqueeze(-1) & (norms > least)).to(products.dtype)
    inverse = torch.where(counts > 0, norms.reciprocal(), 0.0)
    cosines = (inverse.unsqueeze(2) * inverse.unsqueeze(1)).mul_(products.masked_fill_(~real[:, None, None], 0.0))
    return torch.stack([cosines.sum(0), counts.T @ counts])


def _parts(flat: Sequence[Tensor], mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the layers' `[positions, width]` piece by piece as `[layers, piece, width]`, with the piece of the mask.

    All pieces use one memory. It is wide: no square is lost, nor is a product, since a float32 one may run in TF32
    (three digits) when the user asked for speed.
    """
    size = max(1, min(len(mask), NUMBERS_AT_ONCE // (len(flat) * max(len(flat), flat[0].size(-1)))))  # also `_cosines`
    memory = torch.empty(len(flat), size, flat[0].size(-1), device=mask.device, dtype=wide_dtype(mask.device))
    for start in range(0, len(mask), size):
        real = mask[start : start + size]
        piece = memory[:, : len(real)]
        for layer, state in zip(piece, flat, strict=True):
            layer.copy_(state[start : start + size])
        yield piece, real


def similarity_matrix(sums: Tensor) -> Tensor:
    """Mean cosine of every pair of layers from `similarity_sums`: `[..., 2, layers, layers] -> [..., layers, layers]`.

    NaN where no position counts. The entries beside the diagonal, `[l, l + 1]`, compare each layer with the next.
    """
    return (sums[..., 0, :, :] / sums[..., 1, :, :]).clamp(-1.0, 1.0)


def angular_distance(first: Tensor, second: Tensor, real: Tensor | None = None) -> Tensor:
    """Mean over real positions of ``arccos(cos(x, y)) / pi`` between two `[..., width]`, a scalar from 0 to 1.

    Gromov et al. 2024, arXiv:2403.17887, take it at the last position alone, Sun et al. 2025, arXiv:2502.05795, at all.
    A position where either is zero does not count.
    """
    first, second = (states.detach().to(wide_dtype(states.device)) for states in (first, second))
    norms = torch.linalg.vector_norm(first, dim=-1) * torch.linalg.vector_norm(second, dim=-1)
    counts = (norms > 0) if real is None else (norms > 0) & real
    # From the difference of the units, because arccos has lost half of all digits near one.
    x, y = (states / torch.linalg.vector_norm(states, dim=-1, keepdim=True) for states in (first, second))
    apart, together = (torch.linalg.vector_norm(vectors, dim=-1) for vectors in (x - y, x + y))
    return torch.where(counts, 2 / math.pi * torch.atan2(apart, together), 0.0).sum() / counts.sum()


def cosine_similarity(first: Tensor, second: Tensor, real: Tensor | None = None, centered: bool = False) -> Tensor:
    """Mean over real positions of ``cos(x, y) = x . y / (|x| |y|)`` between two `[batch, length, width]`, a scalar.

    Arguments as for `similarity_sums`.
    """
    return similarity_matrix(similarity_sums([first, second], real))[int(centered), 0, 1]


# ---------------------------------------------------------------- attention


def attention_sums(logits: Tensor, mask: Tensor) -> Tensor:
    """Sums of the entropy ``-sum_j a_j log a_j`` of attention weights ``a = softmax(logits)`` over queries and heads.

    Args:
        logits: before the mask, `[..., keys]`.
        mask: true where a query may look, broadcasts to the logits. A query that may look nowhere does not count.

    Returns:
        `[4]`, which add over micro-batches and ranks: the sum, and over how many; the sum of the entropy over the
        largest that is possible, ``log`` of the keys a query may look at, and over how many that may look at two.
    """
    mask = mask.expand_as(logits)
    keys = mask.sum(-1)
    hidden = logits.detach().float().masked_fill(~mask, -torch.finfo(torch.float32).max)
    entropy = torch.special.entr(hidden.softmax(-1)).sum(-1, dtype=wide_dtype(logits.device))
    some, two = keys > 0, keys > 1
    share = entropy / keys.log()
    sums = (torch.where(some, entropy, 0.0), some, torch.where(two, share, 0.0), two)
    return torch.stack([part.sum(dtype=entropy.dtype) for part in sums])


def attention_entropy(logits: Tensor, mask: Tensor, normalized: bool = False) -> Tensor:
    """Mean entropy of attention weights in nats, a scalar; or over the largest possible, from 0 to 1.

    A sharp fall is the collapse of Zhai et al. 2023, arXiv:2303.06296. Arguments as for `attention_sums`.
    """
    total, rows, share, rows_of_two = attention_sums(logits, mask)
    return share / rows_of_two if normalized else total / rows


def largest_logit(logits: Tensor, mask: Tensor) -> Tensor:
    """The largest ``|logit|`` that a query may look at, a scalar; NaN where none may look anywhere.

    Dehghani et al. 2023, arXiv:2302.05442, saw training break where it passed tens of thousands.
    """
    mask = mask.expand_as(logits)
    largest = torch.where(mask, logits.detach().abs(), 0.0).amax()
    return torch.where(mask.any(), largest, math.nan).to(wide_dtype(logits.device))


# ---------------------------------------------------------------- the whole run


def rolling_deviations(values: Tensor, window: int = 1000, fewest: int = 100, earlier: Tensor | None = None) -> Tensor:
    """By how many standard deviations each value is off the mean of those before it: `[values] -> [values]`.

    Args:
        values: a curve, such as the loss by update.
        window: how many values before it count, at most.
        fewest: how many there must be; zero where there are fewer.
        earlier: values before the first.

    A value that is not finite is infinitely far off, and counts for none after it.
    """
    values = values.to(wide_dtype(values.device))
    unknown = values.new_full((window,), math.nan)
    curve = torch.cat([unknown, values] if earlier is None else [unknown, earlier.to(values), values])
    before = curve[-len(values) - window :].unfold(0, window, 1)[:-1]
    at_once = max(1, NUMBERS_AT_ONCE // window)
    parts = []
    for rows, new in zip(torch.split(before, at_once), torch.split(values, at_once), strict=True):
        counted = rows.isfinite()
        count = counted.sum(1)
        mean = torch.where(counted, rows, 0.0).sum(1) / count
        spread = torch.where(counted, rows - mean[:, None], 0.0).square().sum(1).div(count).sqrt()
        off = (new - mean).abs()
        far = torch.where(off > 0, off / spread, 0.0)
        far = torch.where(count >= fewest, far, 0.0)
        parts.append(torch.where(new.isfinite(), far, math.inf))
    return torch.cat(parts)


def spike_score(values: Tensor, deviations: float = 7.0, window: int = 1000, fewest: int = 100) -> Tensor:
    """Share of a curve's values at least seven standard deviations off the mean of the last 1,000, a scalar.

    The definition of OLMo 2 (arXiv:2501.00656), there of the training loss and of the gradient norm. It leaves open
    what the first values are measured against: here, those with fewer than `fewest` before them are no spikes.
    """
    return (rolling_deviations(values, window, fewest) >= deviations).double().mean()


def skip_costs(layers: Sequence[nn.Module], loss: Callable[[], Tensor]) -> Tensor:
    """What each layer is worth: ``loss without layer l - loss``, as `[layers]`; nothing is trained in between.

    A layer that is left out hands on what it was given: `layer.skip(inputs)` where it has that method, else its first
    input in place of its output, or of the first item of a tuple. Sun et al. 2025, arXiv:2502.05795.

    Args:
        layers: parts of the model that `loss` runs.
        loss: runs the model on the same data each time, in evaluation mode, and returns a scalar.
    """

    def skip(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        own = getattr(layer, "skip", None)
        if callable(own):
            return own(inputs)
        return (inputs[0], *output[1:]) if isinstance(output, tuple) else inputs[0]

    with torch.no_grad():
        costs, whole = [], loss()
        for layer in layers:
            handle = layer.register_forward_hook(skip)
            try:
                costs.append(loss() - whole)
            finally:
                handle.remove()
    return torch.stack(costs)


def effective_depth(costs: Tensor, threshold: float = 0.01) -> Tensor:
    """How many layers would be missed: those whose `skip_costs` are above the threshold, an integer scalar."""
    return (costs > threshold).sum()
