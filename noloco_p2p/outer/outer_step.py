"""Take the NoLoCo outer step (arXiv 2506.10911), in place on one vector or a slice of it.

The table maps the symbols of the paper to the names in the code. Peer i forms a group with one partner j. In a solo
step, it is alone in its group.

    phi_i                     slow_weights            weights at the start of the round
    theta_i                   fast_weights            weights at its end; used here only in the outer gradient
    Delta_i = theta_i - phi_i outer gradient          points downhill
    mean_j Delta_j            mean_outer_gradient     own + h in a group, own in a solo step
    mean_j phi_j - phi_i      mean_slow_offset        h of the slow weights in a group, None in a solo step
    delta_i                   outer_momentum          carried from round to round; None if alpha is 0
    alpha, beta, gamma        momentum kept, outer learning rate, mixing strength (the run spec checks their bound)

The half-difference h is explained in `gossip/coder.py`.
"""

from __future__ import annotations

from torch import Tensor


def outer_step(
    slow_weights: Tensor,  # fp32, updated in place
    outer_momentum: Tensor | None,  # fp32, same shape, updated in place; None if alpha is 0
    mean_outer_gradient: Tensor,  # fp32, same shape
    mean_slow_offset: Tensor | None,  # fp32, same shape; None in a solo step, where it is 0
    *,
    alpha: float,
    beta: float,
    gamma: float,
) -> None:
    """Update the momentum and then the slow weights in place. The new fast weights are a copy of the new slow weights.

    Elements are independent, so a vector can be updated slice by slice with the same result. Nothing is allocated. If
    momenta are swapped as well, add their half-difference to `outer_momentum` before the call. The sign of beta agrees
    with the proof (equation 32) and the published code. Equation 2 of the paper has a minus sign instead, although
    Delta points downhill.
    """
    if outer_momentum is None:
        assert not alpha, f"outer_momentum is missing; it is required because alpha is {alpha:g}"
        slow_weights.add_(mean_outer_gradient, alpha=beta)
        if mean_slow_offset is not None:
            slow_weights.add_(mean_slow_offset, alpha=gamma)
        return
    outer_momentum.mul_(alpha).add_(mean_outer_gradient, alpha=beta)  # eq. 2, first two terms
    if mean_slow_offset is not None:
        outer_momentum.add_(mean_slow_offset, alpha=gamma)  # eq. 2, last term
    slow_weights.add_(outer_momentum)  # eq. 3
