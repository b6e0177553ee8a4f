"""What a bundle says of itself: plan.json, also kept inside the weights file.

The text is read with suspicion: sizes, nesting, types and ranges are checked before anything is
unfolded or allocated, and nothing in it is ever executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sapwood.errors import SapwoodError
from sapwood.storage import ranges
from sapwood.types import Plan, Scale

FORMAT = "sapwood-bundle"
VERSION = 1
MAX_BYTES = 64 * 2**20
MAX_DEPTH = 12
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """The content of plan.json. Kept indices stay folded until the shapes are known to be real."""

    before: Mapping[str, Shape]
    after: Mapping[str, Shape]
    keep: Mapping[str, Mapping[int, str]]
    attributes: Mapping[str, Any]
    scales: Mapping[str, tuple[tuple[int, str, float], ...]] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    exact: bool = True
    budget: Mapping[str, Any] = field(default_factory=dict)
    achieved: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    check: Mapping[str, Any] | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    inputs: Any = None
    digests: Mapping[str, str] = field(default_factory=dict)
    compressed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Small buffers that are not part of the state_dict, for models built without data."""
    masks: Mapping[str, str] = field(default_factory=dict)
    """Weights whose zeros are a mask, and its pattern."""
    packed: Mapping[str, int] = field(default_factory=dict)
    """Linear layers that were packed, and up to how many rows of inputs their kernel is used."""
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self, pretty: bool = False) -> str:
        body: dict[str, Any] = {"format": FORMAT, "version": VERSION, "versions": dict(self.versions)}
        body["model"] = dict(self.model)
        body["inputs"] = self.inputs
        body["budget"], body["achieved"] = dict(self.budget), dict(self.achieved)
        body["check"] = None if self.check is None else dict(self.check)
        body["exact"], body["notes"] = self.exact, list(self.notes)
        body["groups"] = dict(self.groups)
        body["attributes"] = {k: _plain(v) for k, v in self.attributes.items()}
        body["shapes"] = {
            n: {"before": list(s), "after": list(self.after[n])} if n in self.keep else {"before": list(s)}
            for n, s in self.before.items()
        }
        body["keep"] = {n: {str(d): text for d, text in dims.items()} for n, dims in self.keep.items()}
        body["scales"] = {
            n: [{"dim": d, "positions": p, "factor": f} for d, p, f in parts] for n, parts in self.scales.items()
        }
        body["aliases"], body["compressed"] = dict(self.aliases), dict(self.compressed)
        body["masks"], body["packed"] = dict(self.masks), dict(self.packed)
        body["buffers"], body["digests"] = dict(self.buffers), dict(self.digests)
        return _lines(body) if pretty else json.dumps(body)

    def plan(self) -> Plan:
        """The plan itself. Call this once ``before`` is known to fit a real model or file."""
        return Plan(
            keep={
                n: {d: ranges.unfold(t, self.before[n][d], f"keep of {n!r}, dim {d}") for d, t in dims.items()}
                for n, dims in self.keep.items()
            },
            attributes=self.attributes,
            shapes={n: self.before[n] for n in self.keep},
            scales={
                n: tuple(Scale(d, ranges.unfold(p, self.before[n][d], f"scale of {n!r}"), f) for d, p, f in parts)
                for n, parts in self.scales.items()
            },
            groups={n: ranges.unfold(t, 10**9, f"group {n!r}") if t else () for n, t in self._small_groups()},
            exact=self.exact,
            budget=self.budget,
            achieved=self.achieved,
            notes=self.notes,
        )

    def _small_groups(self) -> list[tuple[str, str]]:
        """Groups with as many channels as a real parameter can have; the rest is a lie."""
        limit = max((max(s, default=0) for s in self.before.values()), default=0)
        return [(n, t) for n, t in self.groups.items() if not t or ranges.count(t, limit, f"group {n!r}") <= limit]


def from_plan(plan: Plan, before: Mapping[str, Shape], after: Mapping[str, Shape], **rest: Any) -> Record:
    return Record(
        before=before,
        after=after,
        keep={n: {d: ranges.fold(k) for d, k in dims.items()} for n, dims in plan.keep.items()},
        attributes=plan.attributes,
        scales={n: tuple((s.dim, ranges.fold(s.positions), s.factor) for s in p) for n, p in plan.scales.items()},
        groups={n: ranges.fold(k) for n, k in plan.groups.items()},
        exact=plan.exact,
        budget=plan.budget,
        achieved=plan.achieved,
        notes=plan.notes,
        **rest,
    )


def read_record(text: str | bytes, where: str) -> Record:
    """Parse and check; every complaint names the place and the remedy."""
    body = _parse(text, where)
    if body.get("format") != FORMAT:
        raise _bad(where, f"format {FORMAT!r}", repr(body.get("format")), "This is not a Sapwood plan.")
    if body.get("version") != VERSION:
        remedy = "Use the Sapwood that wrote it, or a newer one."
        raise _bad(where, f"version {VERSION}", repr(body.get("version"))[:40], remedy)
    try:
        return _build(body, where)
    except SapwoodError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise _bad(where, "a complete plan", f"{type(error).__name__} ({str(error)[:80]})", "Make it anew.") from None


def _build(body: dict[str, Any], where: str) -> Record:
    shapes = _table(body, "shapes", where)
    before = {_name(n, where): _shape(s["before"], n, where) for n, s in shapes.items()}
    keep: dict[str, dict[int, str]] = {}
    after = dict(before)
    for name, dims in _table(body, "keep", where).items():
        if name not in before:
            raise _bad(where, f"a shape for {name!r}", "none", "The plan is damaged.")
        keep[name] = {}
        shape = list(before[name])
        for key, text in dims.items():
            dim = int(key)
            if not 0 <= dim < len(shape):
                raise _bad(where, f"a dimension of {name!r} {before[name]}", repr(key), "The plan is damaged.")
            shape[dim] = ranges.count(text, shape[dim], f"{where}, keep of {name!r}, dim {dim}")
            keep[name][dim] = text
        after[name] = tuple(shape)
        said = _shape(shapes[name]["after"], name, where)
        if said != after[name]:
            raise _bad(where, f"{name!r} of shape {after[name]} after the cut", str(said), "The plan is damaged.")
    scales: dict[str, tuple[tuple[int, str, float], ...]] = {}
    for name, parts in _table(body, "scales", where).items():
        checked = []
        for part in parts:
            dim, factor = int(part["dim"]), float(part["factor"])
            ranges.count(part["positions"], before[name][dim], f"{where}, scale of {name!r}")
            if not (math.isfinite(factor) and dim >= 0):
                raise _bad(where, "a finite factor", repr(factor), "The plan is damaged.")
            checked.append((dim, str(part["positions"]), factor))
        scales[name] = tuple(checked)
    return Record(
        before=before,
        after=after,
        keep=keep,
        attributes={_name(k, where): _attribute(v, k, where) for k, v in _table(body, "attributes", where).items()},
        scales=scales,
        groups={str(k): str(v) for k, v in _table(body, "groups", where).items()},
        exact=bool(body["exact"]),
        budget=_table(body, "budget", where),
        achieved=_table(body, "achieved", where),
        notes=tuple(str(n) for n in body["notes"]),
        check=body["check"] if isinstance(body["check"], dict) else None,
        model=_table(body, "model", where),
        inputs=body.get("inputs"),
        digests={str(k): str(v) for k, v in _table(body, "digests", where).items()},
        compressed={str(k): _table(v, "", where) for k, v in _table(body, "compressed", where).items()},
        buffers={_name(k, where): _table(v, "", where) for k, v in _table(body, "buffers", where).items()},
        aliases={_name(k, where): _name(v, where) for k, v in _table(body, "aliases", where).items()},
        masks={_name(k, where): str(v)[:40] for k, v in _table({"masks": {}} | body, "masks", where).items()},
        packed={_name(k, where): int(v) for k, v in _table({"packed": {}} | body, "packed", where).items()},
        versions={str(k): str(v) for k, v in _table(body, "versions", where).items()},
    )


def _parse(text: str | bytes, where: str) -> dict[str, Any]:
    if len(text) > MAX_BYTES:
        raise _bad(where, f"at most {MAX_BYTES:,} bytes of plan", f"{len(text):,}", "This is not a Sapwood plan.")
    if _depth(text) > MAX_DEPTH:
        raise _bad(where, f"nesting of at most {MAX_DEPTH}", "more", "This is not a Sapwood plan.")
    try:
        body = json.loads(text, object_pairs_hook=_no_duplicates(where), parse_int=_integer)
    except SapwoodError:
        raise
    except (ValueError, RecursionError) as error:
        raise _bad(where, "JSON", f"{type(error).__name__} ({str(error)[:80]})", "The plan is damaged.") from None
    if not isinstance(body, dict):
        raise _bad(where, "a JSON object", type(body).__name__, "This is not a Sapwood plan.")
    return body


def _depth(text: str | bytes) -> int:
    """Deepest nesting of brackets; brackets in strings count too, which only makes it stricter."""
    raw = text.encode() if isinstance(text, str) else text
    depth = deepest = 0
    for byte in raw if len(raw) < 4096 else raw.translate(None, _NOT_BRACKETS):
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


_NOT_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")


def _integer(text: str) -> int:
    if len(text) > 18:
        raise ValueError("a number of more than 18 digits")
    return int(text)


def _no_duplicates(where: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise _bad(where, "each name once", f"{twice[:80]!r} twice", "The file is damaged.")
        return found

    return build


def _table(body: Any, key: str, where: str) -> dict[str, Any]:
    found = body[key] if key else body
    if not isinstance(found, dict):
        raise _bad(where, f"a table under {key!r}", type(found).__name__, "The plan is damaged.")
    return found


def _name(name: str, where: str) -> str:
    """Names are names of tensors and attributes: never paths."""
    if (
        not isinstance(name, str)
        or not name
        or len(name) > 1000
        or set(name) & set("/\\\0\n")
        or ".." in name
        or "__" in name
    ):
        raise _bad(where, "a name such as 'layer1.0.weight'", repr(name)[:80], "The file is damaged or hostile.")
    return name


def _shape(values: Any, name: str, where: str) -> Shape:
    good = isinstance(values, list) and len(values) <= 16
    if not good or not all(type(v) is int and 0 <= v < 2**48 for v in values):
        raise _bad(where, f"a shape for {name!r}", repr(values)[:80], "The plan is damaged.")
    return tuple(values)


def _attribute(value: Any, name: str, where: str) -> Any:
    """Ints, and tuples of them: all that a cut ever rewrites."""
    if any(part.startswith("__") for part in name.split(".")):
        raise _bad(where, "a name of an attribute", repr(name)[:80], "The file is damaged or hostile.")
    if type(value) is int:
        return value
    if isinstance(value, list) and len(value) <= 64:
        return tuple(_attribute(v, name, where) for v in value)
    raise _bad(where, f"an int or a list of ints for {name!r}", repr(value)[:80], "The plan is damaged.")


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def _lines(body: dict[str, Any]) -> str:
    """One line per entry, so that people can read it and diffs are short."""
    parts = []
    for key, value in body.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _bad(where: str, expected: str, got: str, remedy: str) -> SapwoodError:
    return SapwoodError(f"{where}: expected {expected}; got {got}. {remedy}")
