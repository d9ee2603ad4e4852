"""Studies: experiments besides the papers' tables, run by `equilibria reproduce ID`.

`comparing` decides the claims listed in `claims` with paired seeds. `certified`, `digits`,
`early_exit`, `photographs`, `small_budgets` and `theorem6` are one study each. `study` defines the
interface and writes the files.
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
