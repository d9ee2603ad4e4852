"""OptEq on Cityscapes: Table 10.

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022.
"""

from __future__ import annotations

from equilibria.papers.recipes import QUICK_STREETS, quick_training, recipe
from equilibria.papers.table import Column, PaperTable, RecipeData, Row, register_table

PAPER = "OptEq"
CITYSCAPES: RecipeData = {
    "name": "cityscapes",
    "augmentation": [{"scale_crop": {"size": [512, 1024]}}, "flip"],
    "normalize": True,
}
# 40,000 iterations of 8 images, of which there are 2,975.
STREETS = {
    "epochs": 108,
    "batch_size": 8,
    "optimizer": "sgd",
    "learning_rate": 0.01,
    "weight_decay": 1e-3,
    "schedule": "polynomial",
    "power": 0.9,
    "warmup_epochs": 0.0,
    "clip_norm": 5.0,
}
# That of the recipes camvid-fcn and camvid-deep-opteq.
QUICK = quick_training(
    20,
    batch_size=8,
    weight_decay=0.01,
    schedule="polynomial",
    evaluation_tolerance=1e-4,
    gradient=None,
)
SIZE_OF_OPTEQ = 11_879_827


def street_row(label: str, printed: str, full: RecipeData, quick: str) -> Row:
    figures = dict(zip(("mIoU", "mAcc", "aAcc"), printed.split(), strict=True))
    return Row(label=label, paper=figures, full=full, quick=recipe(quick, QUICK_STREETS, QUICK))


register_table(
    PaperTable(
        id="opteq-t10",
        paper=PAPER,
        title="Table 10, semantic segmentation on Cityscapes",
        columns=(
            Column(title="mIoU", measure="mean_iou"),
            Column(title="mAcc", measure="mean_accuracy"),
            Column(title="aAcc", measure="accuracy"),
        ),
        rows=(
            street_row(
                "FCN",
                "71.47 79.23 95.56",
                recipe(
                    "fcn-segmentation",
                    CITYSCAPES,
                    STREETS,
                    channels=512,
                    widths=[256, 512, 512],
                    stride=8,
                    head_width=128,
                    parameters=SIZE_OF_OPTEQ,
                ),
                "fcn-segmentation",
            ),
            street_row(
                "Deep OptEq",
                "74.47 81.91 95.93",
                recipe("deep-opteq-segmentation-cityscapes", CITYSCAPES, STREETS),
                "deep-opteq-segmentation",
            ),
        ),
        full_remarks=(
            "Left open by the paper: stem, head and their widths, random scales with crops of "
            "512×1024 and flips, gradients clipped at norm 5. Its 40,000 iterations are 108 "
            "epochs.",
        ),
        quick_remarks=(
            "Data: CamVid, 367 street scenes to train on and 233 to test on, at 90×120 pixels, "
            "instead of Cityscapes with 2,975 and 500 at 1024×2048.",
            "20 epochs of AdamW with batches of 8; models of 45 thousand parameters "
            "with layers of widths 16, 32, 32 (paper: 256, 512, 512).",
        ),
    )
)
