"""What a plan requires of a framework that no name, dtype or shape shows, compared with what the framework does."""
from __future__ import annotations

from collections.abc import Callable, Mapping

# Says why a framework does not satisfy a value of one requirement; "" if it does.
Comparison = Callable[[str], str]


def refusal_of(requirements: Mapping[str, str], comparisons: Mapping[str, Comparison]) -> str:
    """Why a worker may not take part in refits of a plan with these `requirements` (`Plan.requirements`); "" if it may.

    Each requirement has to be among the `comparisons`, by its key. One that nobody can compare refuses: elements would stand
    elsewhere than the plan has them, behind the same names and shapes.
    """
    for key, wanted in requirements.items():
        if key not in comparisons:
            return (f'the plan requires {key} "{wanted}", and this release of Refit does not know how to compare that with the '
                    "framework: install the release that compiled the plan, or compile the plan with this one")
        if refusal := comparisons[key](wanted):
            return refusal
    return ""
