"""PSNR, feature networks, and the Fréchet distance against its closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equilibria.data import load_digits
from equilibria.tasks.image_quality import (
    frechet_distance,
    gaussian_distance,
    picture_psnr,
    psnr,
    train_feature_network,
)


def test_one_dimension_has_a_closed_form() -> None:
    """(m₁ − m₂)² + (s₁ − s₂)²."""
    distance = gaussian_distance(
        np.array([1.0]), np.array([[4.0]]), np.array([-2.0]), np.array([[9.0]])
    )
    assert distance == pytest.approx(9 + 1, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("size", "singular"), [(4, 2), (30, 0), (30, 12)])
def test_commuting_covariances_have_a_closed_form(size: int, singular: int, seed: int) -> None:
    """Σ (√λ₁ − √λ₂)² in the shared eigenbasis, also where one or both eigenvalues are zero."""
    chance = np.random.default_rng(seed)
    basis = np.linalg.qr(chance.normal(size=(size, size)))[0]
    one, other = chance.uniform(0, 16, size=(2, size))
    one[:singular] = 0
    other[singular // 2 : singular // 2 + singular] = 0
    mean = np.arange(size, dtype=np.float64)
    distance = gaussian_distance(
        mean, basis @ np.diag(one) @ basis.T, mean, basis @ np.diag(other) @ basis.T
    )
    assert distance == pytest.approx(np.square(np.sqrt(one) - np.sqrt(other)).sum(), abs=1e-9)


def test_general_covariances_agree_with_the_matrix_square_root() -> None:
    from scipy.linalg import sqrtm

    chance = np.random.default_rng(1)
    factors = chance.normal(size=(2, 5, 5))
    one, other = (f @ f.T + 0.1 * np.eye(5) for f in factors)
    expected = np.trace(one + other - 2 * sqrtm(one @ other).real)
    zero = np.zeros(5)
    assert gaussian_distance(zero, one, zero, other) == pytest.approx(expected, rel=1e-9)


def test_a_set_is_at_no_distance_from_itself() -> None:
    rows = torch.randn(50, 8)
    assert frechet_distance(rows, rows) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(rows, rows + 2) == pytest.approx(4 * 8, rel=1e-6)


def test_singular_covariances_are_safe() -> None:
    """Fewer rows than columns, and columns that never change."""
    one, other = torch.randn(6, 20), torch.randn(5, 20)
    one[:, 3:] = 1.0
    distance = frechet_distance(one, other)
    assert np.isfinite(distance)
    assert distance == pytest.approx(frechet_distance(other, one), rel=1e-9)
    assert frechet_distance(torch.ones(4, 3), torch.ones(4, 3)) == 0


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two rows"):
        frechet_distance(torch.randn(1, 3), torch.randn(5, 3))


def test_psnr_is_that_of_the_formula() -> None:
    images = torch.zeros(2, 1, 4, 4)
    other = images.clone()
    other[0] += 0.1
    assert psnr(other, images).tolist() == [pytest.approx(20, abs=1e-5), float("inf")]
    assert float(psnr(other * 255, images, peak=255)[0]) == pytest.approx(20, abs=1e-5)
    with pytest.raises(ValueError, match="two batches of one shape"):
        psnr(images, images[:1])


def test_features_tell_digits_from_noise() -> None:
    data = load_digits()
    images, labels = data.train.fetch(torch.arange(1200))
    network = train_feature_network(images, labels, num_classes=10, epochs=4)
    held_out, answers = data.test.fetch(torch.arange(len(data.test)))
    accuracy = (network(held_out).argmax(dim=1) == answers).float().mean()
    assert accuracy > 0.85
    rows = network.features(held_out)
    same = frechet_distance(network.features(images[:450]), rows)
    noisy = frechet_distance(network.features((held_out + 0.3).clamp(0, 1)), rows)
    assert same < noisy / 3
    again = train_feature_network(images, labels, num_classes=10, epochs=4)
    torch.testing.assert_close(again.features(held_out), rows)


def test_a_feature_network_needs_classes() -> None:
    with pytest.raises(ValueError, match="at least two labelled classes"):
        train_feature_network(torch.rand(4, 1, 8, 8), torch.zeros(4).long(), num_classes=1)


def test_psnr_is_that_of_what_is_seen() -> None:
    originals = torch.zeros(2, 1, 4, 4)
    images = torch.stack([originals[0] + 0.1, originals[1] - 5])
    assert picture_psnr(images, originals).tolist() == pytest.approx([20, 120])
    with pytest.raises(ValueError, match="one shape"):
        picture_psnr(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 3, 3))
