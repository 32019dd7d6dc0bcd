"""What is measured, apart from when: pure functions on tensors and modules, tested against closed forms.

Every function returns tensors and copies nothing to the host, so that a caller can put many results into one transfer.
Results are float64 where the device has it, because a vanishing gradient is what these numbers are there to show: the
square of 1e-20 is zero in float32.

A number that does not exist (a layer without gradient, a similarity over no position) is NaN, never a made-up zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

NUMBERS_AT_ONCE = 2**20  # bounds the temporary copies of `similarity_sums`


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on Apple's devices, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def gradient_norms(modules: Sequence[nn.Module]) -> Tensor:
    """L2 norm of the gradient of all parameters of each module, as `[modules]`.

    ``|g| = sqrt(sum over parameters of sum(g ** 2))``. A parameter in two of the modules counts in both and is read
    once. Parameters whose gradient is None are left out; a module without any gradient is NaN.
    """
    parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
    gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    if not gradients:
        return torch.full((len(modules),), math.nan)
    device = next(iter(gradients.values())).device
    norms = torch._foreach_norm(list(gradients.values()), 2, dtype=wide_dtype(device))
    norm_of = {parameter: norm.to(device) for parameter, norm in zip(gradients, norms, strict=True)}
    missing = norms[0].new_full((), math.nan).to(device)
    groups = [
        torch.stack([norm_of[parameter] for parameter in module.parameters() if parameter in norm_of] or [missing])
        for module in modules
    ]
    return torch.stack(torch._foreach_norm(groups, 2))


def squared_norm(tensor: Tensor) -> Tensor:
    """``sum(x ** 2)``, a scalar: squares add over tensors, micro-batches and ranks where norms do not."""
    return torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor.device)).square()


def gradient_ratio(norms: Tensor) -> Tensor:
    """Norm of every layer but the last over the last layer's: ``[layers] -> [layers - 1]``, ``|g_l| / |g_L|``.

    NaN where the last layer's norm is zero, infinite or missing.
    """
    last = norms[-1]
    return torch.where((last > 0) & last.isfinite(), norms[:-1] / last, math.nan)


def activation_rms(states: Tensor, real: Tensor | None = None) -> Tensor:
    """``sqrt(mean(x ** 2))`` over the real positions of `[..., width]`, a scalar; `real` bool `[...]`, None is all."""
    squares = states.detach().to(wide_dtype(states.device)).square().mean(dim=-1)
    if real is None:
        return squares.mean().sqrt()
    return (torch.where(real, squares, 0.0).sum() / real.sum()).sqrt()


def similarity_sums(states: Sequence[Tensor], real: Tensor | None = None, centered: bool = False) -> Tensor:
    """Sums of the cosine between the outputs of all pairs of layers, and how many positions they run over.

    Both add over micro-batches and ranks; `similarity_matrix` turns the total into means.

    Args:
        states: one tensor a layer, all of one shape `[..., width]`.
        real: bool `[...]`, the positions that count; None is all of them. A position where either layer's state is zero
            does not count for that pair.
        centered: subtract each layer's mean over the real positions first, which takes out what all tokens share.

    Returns:
        `[2, layers, layers]`: sums, counts.

    Raises:
        ValueError: if the shapes differ.
    """
    if len({state.shape for state in states}) > 1:
        raise ValueError(f"layers of different shape cannot be compared: {[tuple(state.shape) for state in states]}")
    flat = [state.detach().flatten(0, -2) for state in states]
    mask = flat[0].new_ones(len(flat[0]), dtype=torch.bool) if real is None else real.flatten()
    mean = torch.zeros(len(flat), 1, flat[0].size(-1), device=mask.device)
    if centered:
        mean = sum((part.sum(dim=1, keepdim=True) for part, _ in _parts(flat, mask)), mean) / mask.sum()
    wide = wide_dtype(mask.device)
    # A difference to the mean that is smaller has no direction.
    rounding = 1e-6 * torch.linalg.vector_norm(mean, dim=-1, keepdim=True, dtype=wide)
    sums = torch.zeros(2, len(flat), len(flat), device=mask.device, dtype=wide)
    for part, real_part in _parts(flat, mask):
        vectors = part - mean if centered else part
        norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=wide)  # wide: no square is lost
        counts = real_part.unsqueeze(-1) & (norms > rounding)
        units = vectors * torch.where(counts, norms.reciprocal(), 0.0)
        # The product is wide too, since a float32 one may run in TF32 (three digits) when the user asked for speed.
        sums[0].addmm_(units.flatten(1), units.flatten(1).T)
        sums[1].addmm_(counts.squeeze(-1).to(wide), counts.squeeze(-1).to(wide).T)
    return sums


def _parts(flat: Sequence[Tensor], mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the layers' `[positions, width]` piece by piece as float32 `[layers, piece, width]`, zero at padding."""
    size = max(1, NUMBERS_AT_ONCE // (len(flat) * flat[0].size(-1)))
    for start in range(0, len(mask), size):
        piece = slice(start, start + size)
        layers = torch.stack([state[piece] for state in flat]).float()
        yield layers.masked_fill_(~mask[piece].unsqueeze(-1), 0.0), mask[piece]


def similarity_matrix(sums: Tensor) -> Tensor:
    """Mean cosine of every pair of layers from `similarity_sums`: `[2, layers, layers] -> [layers, layers]`.

    NaN where no position counts. The entries beside the diagonal, `[l, l + 1]`, compare each layer with the next.
    """
    return (sums[0] / sums[1]).clamp(-1.0, 1.0)


def cosine_similarity(first: Tensor, second: Tensor, real: Tensor | None = None, centered: bool = False) -> Tensor:
    """Mean over real positions of ``cos(x, y) = x . y / (|x| |y|)`` between two `[batch, length, width]`, a scalar.

    Arguments as for `similarity_sums`.
    """
    return similarity_matrix(similarity_sums([first, second], real, centered))[0, 1]
