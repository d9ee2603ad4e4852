"""Studies: experiments besides the papers' tables, which `equilibria reproduce ID` carries out.

`comparing` decides claims by paired seeds, for the comparisons listed in `claims`. Each other
module is one study. Settings are dataclasses; `study` writes the files.
"""

from equilibria.papers.studies import (
    certified,
    comparing,
    digits,
    early_exit,
    photographs,
    small_budgets,
    theorem6,
)
from equilibria.papers.studies.study import Study


def list_studies() -> list[Study]:
    """Return all studies: those that decide claims of the papers, then the others.

    Examples:
        >>> "theorem6" in [study.id for study in eq.papers.list_studies()]
        True
    """
    return [
        *comparing.studies(),
        digits.STUDY,
        small_budgets.STUDY,
        certified.STUDY,
        early_exit.STUDY,
        theorem6.STUDY,
        photographs.STUDY,
    ]
