"""Certified radii from a file of weights alone, in float64, without Equilibria and PyTorch.

    python tests/certificates/recompute.py MODEL.safetensors IMAGES.npy

IMAGES has shape (B, channels, height, width), with pixels in [0, 1]. Prints class and radius (L2)
of each image. Knows networks of dense reflections, z = argmin ½‖z − u‖² + ½‖σ(Wz + b)‖².
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np


def read(file: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Return the tensors in float64, and the options of the model."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    model = json.loads(header.pop("__metadata__")["equilibria"])["model"]
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], "<f4").reshape(entry["shape"]).astype(float)
    return tensors, model


def dense(u: np.ndarray, W: np.ndarray, v: np.ndarray, b: np.ndarray, zeta: float) -> np.ndarray:
    """Return 2z − u, z found by gradient steps that contract by ζ²/(2 + ζ²)."""
    W = W * min(1.0, zeta / np.linalg.norm(W @ (v / np.linalg.norm(v))))
    z = u
    for _ in range(400):
        z = z - 2 / (2 + zeta**2) * (z - u + np.maximum(z @ W.T + b, 0) @ W)
    return 2 * z - u


def radii(file: Path, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the class and the certified radius of each image."""
    tensors, model = read(file)
    options = model["options"]
    u = images.astype(float).reshape(len(images), -1) - options.get("center", 0.0)
    layers = sorted({name.split(".cell.")[0] for name in tensors if ".cell." in name})
    for layer in sorted(layers, key=lambda name: (name == "layer", name)):
        W, v, b = (
            next(
                value
                for name, value in tensors.items()
                if name.startswith(f"{layer}.cell") and name.endswith(end)
            )
            for end in ("W.kernel", "W.norm_vector", "bias")
        )
        u = dense(u, W, v, b, options.get("zeta", 4.0))
    rows = tensors["head.direction"]
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    logits = u @ rows.T + tensors["head.bias"]
    best = logits.argmax(1)
    steepness = np.linalg.norm(rows[best][:, None] - rows[None], axis=2)
    margins = logits.max(1, keepdims=True) - logits
    with np.errstate(invalid="ignore"):
        distances = margins / steepness  # 0/0 for the class itself
    return best, np.nanmin(distances, axis=1)


if __name__ == "__main__":
    for label, radius in zip(*radii(Path(sys.argv[1]), np.load(sys.argv[2])), strict=True):
        print(label, radius)
