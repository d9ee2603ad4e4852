"""What a model minimizes, in a formula and a few words."""

from __future__ import annotations

from dataclasses import dataclass

from equilibria.models import DeepOptEqCell, EquilibriumClassifier, OptEqCell


@dataclass(frozen=True)
class Story:
    """`objective` and `equilibrium` are formulas; `reading` says how to read them."""

    objective: str
    equilibrium: str
    reading: str


def tell_story(model: EquilibriumClassifier) -> Story:
    """The formula of the hidden objective of this model's cell."""
    cell = model.layer.cell
    if isinstance(cell, OptEqCell):
        return Story(
            "G(y; x) = 1ᵀf(y) + ½‖y‖² − ⟨Ux + b, y⟩ − ½‖Wᵀy‖²"
            if cell.mu == 1
            else "G(y; x) = 1ᵀf(y) + ½‖y‖² − ⟨Ux + b, y⟩ − ‖Wᵀy‖²/2μ",
            "y* = argmin G(y; x)   ⇔   y* = σ(WWᵀy* + Ux + b)"
            if cell.mu == 1
            else "y* = argmin G(y; x)   ⇔   y* = σ(WWᵀy*/μ + Ux + b)",
            "f is the penalty whose proximal operator is the activation σ (for ReLU: y ≥ 0), and x "
            "the image after the stem. One iteration of the layer is one step of proximal gradient "
            "descent on G.",
        )
    if isinstance(cell, DeepOptEqCell):
        return _deep_story(len(cell.units()))
    if cell.formula is not None:
        return Story(
            cell.formula,
            "0 ∈ ∂G(y*)   ⇔   y* = σ(−∇E(y*)),   E = G − 1ᵀf − ½‖·‖²",
            "f is the penalty whose proximal operator is the activation σ, and x the image after "
            "the stem. The equilibrium is a stationary point of G.",
        )
    return Story(
        "y* = T(y*; x)",
        "",
        "This layer is an equilibrium without a hidden objective: its residual ‖y − T(y)‖ is all "
        "that can be watched.",
    )


def _deep_story(layers: int) -> Story:
    if layers == 1:
        return Story(
            "Φ(z) = α M(z),   M the Moreau envelope of the convex φ",
            "z* = argmin Φ(z)   ⇔   z* = αWᵀσ(Wz* + Ux + b) + (1 − α)z*",
            "The layer is the proximal operator of Φ, so one iteration is one proximal step on it.",
        )
    if layers == 2:
        return Story(
            "Φ(z₁, z₂) = α M₁(z₁) + α M₂(z₂) + ½‖z₁ − z₂‖²",
            "(z₁*, z₂*) = argmin Φ   ⇔   z₁* = f₁(z₂*),  z₂* = f₂(z₁*)",
            "M₁ and M₂ are the Moreau envelopes of the two layers' convex functions. One iteration "
            "minimizes over z₁ and then over z₂, so the objective cannot rise.",
        )
    return Story(
        "0 = ∇Φ(z̃*) + (I − P) z̃*,   Φ(z̃) = Σ α Mᵢ(zᵢ)",
        f"z* = f_{layers}(… f₂(f₁(z*)))",
        f"With more than two layers (here {layers}) no objective exists: the equilibrium solves a "
        "monotone inclusion, P shifting the blocks by one. The curves below therefore show how far "
        "each iterate is from solving it, ‖z − T(z)‖, and no objective.",
    )
