"""Groups of channels by the names of what makes them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from sapwood.capture.trace import Trace
from sapwood.errors import explain


def named_groups(trace: Trace, patterns: Iterable[str], where: str = "ignore") -> set[str]:
    """Groups whose channels are made by what the patterns name.

    A module name stands for the channels that this module makes (its inputs may still shrink); a
    full parameter name stands for every dimension of that parameter.
    """
    if isinstance(patterns, str):
        patterns = (patterns,)
    names = list(trace.shapes)
    modules = sorted({".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 1)})
    result: set[str] = set()
    for pattern in patterns:
        chosen, exact = _matching(pattern, names, modules, where)
        sites = {(n, d) for n in chosen for d in range(len(trace.shapes[n]))}
        made = {s for s in sites if s in trace.made}
        wanted = made if made and not exact else sites
        result |= {g.name for g in trace.groups if wanted & set(g.sites)}
    return result


def _matching(pattern: str, names: list[str], modules: list[str], where: str) -> tuple[list[str], bool]:
    if pattern.startswith("re:"):
        try:
            fits = re.compile(pattern[3:]).fullmatch
        except re.error as error:
            raise explain("a regular expression after 're:'", f"{pattern!r} ({error})", "Mend it.", where) from None
        hit = {m for m in modules if fits(m)}
        chosen = [n for n in names if fits(n) or any(n.startswith(m + ".") for m in hit)]
    else:
        if pattern in names:
            return [pattern], True
        chosen = [n for n in names if n.startswith(pattern + ".")]
    if not chosen:
        near = difflib.get_close_matches(pattern.removeprefix("re:"), [*modules, *names], n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise explain(
            "names of parameters or modules",
            f"{pattern!r}, which matches nothing",
            f"Use a name of model.named_modules() or 're:...'.{hint}",
            where,
        )
    return chosen, False
