"""Certificates: what is proven about the predictions of a classifier.

`certify` returns a `Certificate`: per image an error bound, whether the predicted class is that of
the exact equilibrium, and a radius within which no image has another class. `certifier` prepares a
model for many batches. `CertifiedExit` stops each solve when the class is certain.
`docs/certificates.md` states what is proven and which file contains which step.
"""

from equilibria.certificates import layer, reflection  # noqa: F401 - they register certifiers
from equilibria.certificates.certificate import (
    Certificate,
    Certifier,
    NoCertificateError,
    SolvedBatch,
    certifier,
    certify,
)
from equilibria.certificates.early_exit import CertifiedExit

__all__ = [
    "Certificate",
    "CertifiedExit",
    "Certifier",
    "NoCertificateError",
    "SolvedBatch",
    "certifier",
    "certify",
]
