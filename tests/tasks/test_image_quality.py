"""PSNR, feature networks, and the closed form of the Fréchet distance."""

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


def test_distance_in_one_dimension_agrees_with_the_closed_form() -> None:
    """The distance is (m₁ − m₂)² + (s₁ − s₂)²."""
    distance = gaussian_distance(
        np.array([1.0]), np.array([[4.0]]), np.array([-2.0]), np.array([[9.0]])
    )
    assert distance == pytest.approx(9 + 1, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("size", "singular"), [(4, 2), (30, 0), (30, 12)])
def test_distance_of_commuting_covariances_agrees_with_the_closed_form(
    size: int, singular: int, seed: int
) -> None:
    """The distance is Σ (√λ₁ − √λ₂)² in the shared eigenbasis, even for zero eigenvalues."""
    generator = np.random.default_rng(seed)
    basis = np.linalg.qr(generator.normal(size=(size, size)))[0]
    first, second = generator.uniform(0, 16, size=(2, size))
    first[:singular] = 0
    second[singular // 2 : singular // 2 + singular] = 0
    mean = np.arange(size, dtype=np.float64)
    distance = gaussian_distance(
        mean, basis @ np.diag(first) @ basis.T, mean, basis @ np.diag(second) @ basis.T
    )
    assert distance == pytest.approx(np.square(np.sqrt(first) - np.sqrt(second)).sum(), abs=1e-9)


def test_distance_agrees_with_the_matrix_square_root() -> None:
    from scipy.linalg import sqrtm

    generator = np.random.default_rng(1)
    factors = generator.normal(size=(2, 5, 5))
    first, second = (f @ f.T + 0.1 * np.eye(5) for f in factors)
    expected = np.trace(first + second - 2 * sqrtm(first @ second).real)
    zero = np.zeros(5)
    assert gaussian_distance(zero, first, zero, second) == pytest.approx(expected, rel=1e-9)


def test_distance_of_equal_and_shifted_sets() -> None:
    rows = torch.randn(50, 8)
    assert frechet_distance(rows, rows) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(rows, rows + 2) == pytest.approx(4 * 8, rel=1e-6)


def test_distance_is_finite_for_singular_covariances() -> None:
    """There are fewer rows than columns, and constant columns."""
    first, second = torch.randn(6, 20), torch.randn(5, 20)
    first[:, 3:] = 1.0
    distance = frechet_distance(first, second)
    assert np.isfinite(distance)
    assert distance == pytest.approx(frechet_distance(second, first), rel=1e-9)
    assert frechet_distance(torch.ones(4, 3), torch.ones(4, 3)) == 0


def test_single_row_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least two images"):
        frechet_distance(torch.randn(1, 3), torch.randn(5, 3))


def test_psnr_agrees_with_the_formula() -> None:
    images = torch.zeros(2, 1, 4, 4)
    other = images.clone()
    other[0] += 0.1
    assert psnr(other, images).tolist() == [pytest.approx(20, abs=1e-5), float("inf")]
    assert float(psnr(other * 255, images, peak=255)[0]) == pytest.approx(20, abs=1e-5)
    with pytest.raises(ValueError, match="batches of the same shape"):
        psnr(images, images[:1])


def test_features_separate_digits_from_brightened_ones() -> None:
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


def test_feature_network_needs_two_classes() -> None:
    with pytest.raises(ValueError, match="at least two labelled classes"):
        train_feature_network(torch.rand(4, 1, 8, 8), torch.zeros(4).long(), num_classes=1)


def test_picture_psnr_clamps_to_the_pixel_range() -> None:
    originals = torch.zeros(2, 1, 4, 4)
    images = torch.stack([originals[0] + 0.1, originals[1] - 5])
    assert picture_psnr(images, originals).tolist() == pytest.approx([20, 120])
    with pytest.raises(ValueError, match="same shape"):
        picture_psnr(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 3, 3))
