"""Every table and figure of the papers is in the list of `equilibria reproduce`."""

from __future__ import annotations

import re

import pytest

from equilibria.papers import find_table, list_tables
from equilibria.papers.table import list_elsewhere
from tests.program import invoke

# Numbers and first words of the captions, as printed, including appendices. Both versions of the
# MOptEqs paper have the same.
PRINTED = {
    "opteq": """
        Table 1: Examples to Modify the Underlying Optimization Problem
        Table 2: Some Choices for R_z and the Corresponding T_R
        Table 3: The Testing Accuracy (Acc.) of Deep OptEq With Different Settings
        Table 4: Comparisons With Previous Implicit Models
        Table 5: The Testing Accuracy of Deep OptEq With Different Settings
        Table 6: The Detailed Archit. of OptEQs
        Table 7: Evaluation Results on ImageNet Classification
        Table 8: Comparison Between Unrolling and IFT Based Training
        Table 9: Comparison Between FPS on ImageNet
        Table 10: Evaluation on the Validation Set of Cityscapes
    """,
    "mopteqs": """
        Table 1 (a): Comparison of the models with single-scales
        Table 1 (b): Comparison of the models with multiple-scales
        Table 2 (a): Evaluation on CIFAR-100 for models
        Table 2 (b): Evaluation on Imagenette for models
        Table 3: Evaluation on MOptEqs trained with and without considering D and H part
        Table 4: Evaluation on MOptEqs on ImageNet
        Table 5: Evaluation on MOptEqs trained by PGD-3 with and without PE method
        Table 6: The comparison of the computational cost of MDEQ and our MOptEqs
        Figure 1: The structure of the MOptEqs and HH&D Module
        Figure 2: Visualization of the channels correlations
        Figure 3 (a): Test accuracy changes with respect to the perturbation size
        Figure 3 (b): Test Accuracy for small MOptEqs (w. and w/o. PE) under PGD attack
        Figure 3 (c): Plot of the accuracies for the small MOptEqs without HH&D
        Figure 4: The convergent iterations' of our forward root-finding procedure
    """,
    "geq": """
        Table 1 (a): CIFAR-10
        Table 1 (b): CIFAR-100
        Table 2 (a): ImageNette
        Table 2 (b): ImageNet-100
        Table 3: Empirical rsults on CIFAR-100's super-class classification
        Table 4: The hidden optimization problems and their related equilibrium models
        Table 5: Comparison of equilibrium models with different kernel functions
        Figure 1: The sketch map of one layer GEQ's n-th fixed point iteration
        Figure 2: The results for different models under different corruptions
        Figure 3: Saliency map for GEQ and MOptEqs on the ImageNet image
        Figure 4: The influence on the patch size and the channel splitting parameter
    """,
    "jiio": """
        Table 1: Comparison of FID scores
        Table 2: Time taken to compute adversarial example of a MDEQ model on MNIST
        Table 3: Time taken to perform JIIO optimization v/s Adam
        Table 4: Comparison of Median PSNR values
        Table 5: Comparison of adversarial training approaches, ε = 1
        Table 6: Accuracy obtained on the 5-way, 1-shot task from the omniglot dataset
        Table 7: Time taken by JIIO vs. Adam to perform inner-loop optimization
        Table 8: Comparison of adversarial training approaches, ε = 0.5
        Table 9: MDEQ hyperparameters for each task
        Figure 1: Performing each gradient update on DEQ inputs requires a fixed point
        Figure 2: Samples generated with JIIO on a small MDEQ network
        Figure 3: Cost changing with time for Adam v/s JIIO optimization
        Figure 4: Comparing different acceleration techniques on a MDEQ-VAE decoder
        Figure 5: Generated Samples and Reconstructions
        Figure 6: Reconstructions obtained from JIIO-MDEQ trained on 256x256 FFHQ
        Figure 7: Supervised Image Denoising, N(0, 0.2)
        Figure 8: Unsupervised Image Denoising, N(0, 0.2)
        Figure 9: Supervised Image Denoising, N(0, 0.4)
        Figure 10: Unsupervised Image Denoising, N(0, 0.4)
        Figure 11: Supervised Image Inpainting
        Figure 12: Unsupervised Image Inpainting
        Appendix C.6: Space complexity of the method
    """,
}
SPLIT = {"jiio-t4": ("jiio-t4a", "jiio-t4b", "jiio-t4c")}
"""Tables of the papers that are several tables here; the columns of Table 4 are three tasks."""


def printed_ids() -> list[str]:
    ids = []
    for paper, captions in PRINTED.items():
        for caption in captions.strip().splitlines():
            number, _, words = caption.strip().partition(": ")
            assert words
            kind, *place = number.split(" ")
            short = {"Table": "t", "Figure": "f", "Appendix": ""}[kind]
            name = "".join(place).lower().replace(".", "")
            ids.append(f"{paper}-{short}{re.sub(r'[()]', '', name)}")
    return ids


def test_list_contains_exactly_the_items_of_the_papers() -> None:
    expected = [part for name in printed_ids() for part in SPLIT.get(name, (name,))]
    tables, others = list_tables(), list_elsewhere()
    listed = [item.id for item in (*tables, *others)]
    assert sorted(listed) == sorted(expected)


def test_titles_begin_with_the_number_in_the_paper() -> None:
    for item in (*list_tables(), *list_elsewhere()):
        paper, short = item.id.split("-")
        kind = {"t": "Table", "f": "Figure", "c": "Appendix"}[short[0]]
        number = re.match(rf"{kind} (?:C\.)?(\d+)", item.title)
        assert number is not None, item.title
        match = re.search(r"\d+", short)
        assert match is not None
        assert number[1] == match[0], item.title
        assert paper in PRINTED


@pytest.mark.parametrize("other", list_elsewhere(), ids=lambda other: other.id)
def test_other_items_refer_to_a_table_or_give_a_reason(other: object) -> None:
    from equilibria.papers.table import Elsewhere

    assert isinstance(other, Elsewhere)
    assert (other.table is None) == bool(other.why)
    assert "\n" not in other.why
    assert "being built" not in other.why
    if other.table is not None:
        assert find_table(other.id) is find_table(other.table)
        return
    result = invoke("reproduce", other.id)
    assert result.exit_code != 0
    assert f"{other.id} ({other.title}) cannot be reproduced" in " ".join(result.output.split())


def test_every_table_runs_in_both_settings() -> None:
    for table in list_tables():
        for setting in ("full", "quick"):
            assert any(row.recipe(setting) is not None for row in table.rows), table.id


def test_command_lists_all_items() -> None:
    result = invoke("reproduce")
    assert result.exit_code == 0, result.output
    for item in (*list_tables(), *list_elsewhere()):
        assert item.id in result.output
