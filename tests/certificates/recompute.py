"""Certified radii from a file of weights alone, in float64, without Equilibria and PyTorch.

    python tests/certificates/recompute.py MODEL.safetensors IMAGES.npy

IMAGES has shape (B, channels, height, width), with pixels in [0, 1]. Prints class and radius (L2)
of each image. Knows networks of dense reflections, z = argmin ½‖z − u‖² + ½‖σ(Wz + b)‖², and of
orthonormal reflections of patches and of vectors, z = u − ω/(1 + ω) Qᵀσ(Qu + b).
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np

STAGES = {"reflection-patches": [[4, 96, 4], [4, 192, 4]]}
"""Sides of patches, rows, and number of reflections, where the file does not state them."""


def read(file: Path) -> tuple[dict[str, np.ndarray], str, dict]:
    """Return the tensors in float64, the name of the model and its options."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    model = json.loads(header.pop("__metadata__")["equilibria"])["model"]
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], "<f4").reshape(entry["shape"]).astype(float)
    return tensors, model["name"], model["options"]


def reflect(u: np.ndarray, parts: dict[str, np.ndarray], options: dict) -> np.ndarray:
    """Return 2z − u of one reflection along the last axis."""
    K, b = parts["W.kernel"], parts["bias"]
    if "W.norm_vector" not in parts:  # orthonormal rows by Cholesky-QR
        gram, weight = K @ K.T, options.get("weight", 100.0)
        L = np.linalg.cholesky(gram + 1e-5 * gram.diagonal().mean() * np.eye(len(K)))
        Q = np.linalg.solve(L, K)
        return u - 2 * weight / (1 + weight) * np.maximum(u @ Q.T + b, 0) @ Q
    v, zeta = parts["W.norm_vector"], options.get("zeta", 4.0)
    W = K * min(1.0, zeta / np.linalg.norm(K @ (v / np.linalg.norm(v))))
    z = u
    for _ in range(400):  # steps that contract by ζ²/(2 + ζ²)
        z = z - 2 / (2 + zeta**2) * (z - u + np.maximum(z @ W.T + b, 0) @ W)
    return 2 * z - u


def radii(
    tensors: dict[str, np.ndarray], name: str, options: dict, images: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the class and the certified radius of each image."""
    layers: dict[str, dict[str, np.ndarray]] = {}
    for key, value in tensors.items():
        if ".cell." in key:
            place, part = key.split(".cell.energy.terms.convex_potential.")
            layers.setdefault(place, {})[part.removeprefix("term.")] = value
    places = sorted(layers, key=lambda place: int(place.partition(".")[2] or 10**6))
    u = images.astype(float) - options.get("center", 0.0)
    for k, _, count in options.get("stages", STAGES.get(name, [])):
        B, C, H, W = u.shape  # squares of 2×2 pixels become channels
        u = u.reshape(B, C, H // 2, 2, W // 2, 2).transpose(0, 1, 3, 5, 2, 4)
        u = u.reshape(B, 4 * C, H // 2, W // 2).transpose(0, 2, 3, 1)
        split = (B, H // 2 // k, k, W // 2 // k, k, 4 * C)
        for index in range(count):
            u = np.roll(u, -(k // 2) * (index > 0), (1, 2)).reshape(split).swapaxes(2, 3)
            moved = u.shape
            u = reflect(u.reshape(B, -1, k * k * 4 * C), layers[places.pop(0)], options)
            u = u.reshape(moved).swapaxes(2, 3).reshape(B, H // 2, W // 2, 4 * C)
        u = u.transpose(0, 3, 1, 2)
    u = u.reshape(len(images), -1)
    for place in places:
        u = reflect(u, layers[place], options)
    rows = tensors["head.direction"]
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    logits = u @ rows.T + tensors["head.bias"]
    best = logits.argmax(1)
    margins = logits.max(1, keepdims=True) - logits
    steepness = np.linalg.norm(rows[best][:, None] - rows[None], axis=2)
    margins[np.arange(len(best)), best], steepness[np.arange(len(best)), best] = np.inf, 1
    return best, (margins / steepness).min(1)


if __name__ == "__main__":
    for label, radius in zip(*radii(*read(Path(sys.argv[1])), np.load(sys.argv[2])), strict=True):
        print(label, radius)
