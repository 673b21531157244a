"""What a query may attend to: the answers that a cache gives and that attention takes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DenseView:
    """Attend causally to a contiguous run: the T queries are the last T of the S tokens.

    Shapes: k_KSD, v_KSD.
    """

    k_KSD: Tensor
    v_KSD: Tensor


@dataclass(frozen=True)
class SlotView:
    """Attend to slots in any order; ``allowed_KTE`` says which slot each query may see.

    Shapes: k_KED, v_KED, allowed_KTE (bool).
    """

    k_KED: Tensor
    v_KED: Tensor
    allowed_KTE: Tensor


View = DenseView | SlotView
