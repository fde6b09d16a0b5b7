"""What the first rank does for all; what fails on one rank is raised on all."""

import json
from collections.abc import Callable
from typing import Any

from seqpar.consensus import gather_texts
from seqpar.data.errors import DataError
from seqpar.mesh import Mesh


def by_first(act: Callable[[], Any], mesh: Mesh) -> Any:
    """Returns on every rank what the first one's ``act`` returned, as JSON has it; its error is raised on all."""
    error: ValueError | None = None
    told = ""
    if mesh.is_first:
        try:
            told = json.dumps({"value": act()})
        except ValueError as problem:
            error = problem
            kept = isinstance(problem, DataError)
            told = json.dumps({"problem": [problem.path, problem.problem] if kept else [str(problem)]})  # type: ignore[attr-defined]
    answer = json.loads(gather_texts(told, mesh.world)[0])
    if error is not None:
        raise error
    if "problem" in answer:
        raise (DataError if len(answer["problem"]) > 1 else ValueError)(*answer["problem"])
    return answer["value"]


def raise_together(act: Callable[[], str], mesh: Mesh) -> str:
    """Returns what ``act`` returns; what hinders it on any rank is raised on all."""
    found, hindered = "", None
    try:
        found = act()
    except ValueError as error:
        hindered = error
    for rank, told in enumerate(gather_texts(str(hindered or ""), mesh.world)):
        if told:
            raise hindered or ValueError(f"rank {rank}: {told}")
    return found
