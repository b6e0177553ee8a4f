"""Recipes: what ``sapwood run`` does, as a small YAML file. Every key is known; a wrong one names the nearest."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sapwood.errors import SapwoodError, explain
from sapwood.masking.mask import SCOPES
from sapwood.measurement.backends import BACKENDS
from sapwood.pipeline.steps import Step, require_fading
from sapwood.planning.sharing import require_allocation
from sapwood.recovery.loop import Settings
from sapwood.recovery.rates import Rate
from sapwood.recovery.schedules import Schedule
from sapwood.recovery.settings import require_unscaled
from sapwood.scoring.elements import NAMES as ELEMENT_SCORES
from sapwood.scoring.weights import NAMES as CHANNEL_SCORES
from sapwood.types import Budget

SHIPPED = Path(__file__).parents[1] / "recipes"
_BUDGETS = ("sparsity", "channels", "params", "flops", "latency")
_MASKING = ("scope", "score", "include", "ignore", "seed")
_CUTTING = ("score", "allocate", "ignore", "round_to", "backend")


@dataclass(frozen=True)
class DataPart:
    """``name`` is digits, cifar10:FOLDER, folder:PATH or package.module:loaders; ``size`` of images in pixels."""

    name: str
    batch: int = 128
    size: int | None = None
    workers: int = 0


@dataclass(frozen=True)
class ModelPart:
    """``name`` is torchvision:..., timm:..., hf:... or package.module:factory, called with ``arguments``."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainPart:
    """The original training. With ``weights`` it is left out, and ``epochs`` says how long it was."""

    epochs: float = 20
    lr: float = 0.1
    optimizer: str = "sgd"
    weight_decay: float = 5e-4
    anneal: str = "linear"
    warmup: float = 0.1
    weights: str | None = None


@dataclass(frozen=True)
class RecoverPart:
    """Training after each step of pruning; ``lr`` is that of the original training unless given.

    The dense model teaches (``distill``) where the data has no loss and no metric of its own, so that the model gives
    class scores. Gradients are clipped to a norm of ``clip``; 0 leaves them as they are.
    """

    fraction: float = 0.2
    lr: float | None = None
    rate: str = "rewind"
    anneal: str = "linear"
    warmup: float = 0.1
    distill: bool | None = None
    temperature: float = 4.0
    share: float = 0.9
    optimizer: str | None = None
    weight_decay: float | None = None
    clip: float = 1.0
    mixed_precision: str = "no"
    accumulate: int = 1
    channels_last: bool = False
    compile: bool = False
    fused: bool = False
    graph: bool = False


@dataclass(frozen=True)
class PrunePart:
    """One of sparsity, channels, params, flops, latency (or an N:M pattern), and how.

    A latency is measured with ``batch`` examples at once (as many as the data's example has, if it is left out), by
    ``backend``. ``until``, ``regrow``, ``fade`` and ``mend`` (a number of batches) are those of ``prune_and_recover``.
    """

    sparsity: float | None = None
    channels: float | int | None = None
    params: float | int | None = None
    flops: float | int | None = None
    latency: float | str | None = None
    batch: int | None = None
    backend: str | None = None
    pattern: str = "unstructured"
    scope: str | None = None
    score: str | None = None
    allocate: str | Mapping[str, float] | None = None
    include: Sequence[str] | None = None
    ignore: Sequence[str] | None = None
    round_to: int | str | None = None
    schedule: str = "one-shot"
    rounds: int = 1
    until: float | None = None
    regrow: float | None = None
    seed: int | None = None
    fade: float | None = None
    mend: int | None = None

    def step(self) -> Step:
        given = {k: getattr(self, k) for k in _BUDGETS if getattr(self, k) is not None}
        budget = Budget(**given) if given else None
        allowed = _MASKING if budget is None or budget.kind == "sparsity" else _CUTTING
        chosen = {k: getattr(self, k) for k in {*_MASKING, *_CUTTING} if getattr(self, k) is not None}
        for key in sorted(set(chosen) - set(allowed)):
            kind = "zeros" if allowed is _MASKING else "channels"
            raise explain(f"one of {', '.join(allowed)} for {kind}", repr(key), "Leave it out.", "prune")
        names = {
            "scope": SCOPES,
            "score": ELEMENT_SCORES if allowed is _MASKING else CHANNEL_SCORES,
            "backend": ("auto", *BACKENDS),
        }
        for key, known in names.items():
            if key in chosen and chosen[key] not in known:
                raise explain(f"one of {', '.join(known)}", repr(chosen[key]), "Mend it.", f"prune, {key}")
        if "allocate" in chosen:
            require_allocation(chosen["allocate"], budget.kind if budget else "", "prune, allocate")
        for key in ("ignore", "include"):
            if key in chosen and not (isinstance(chosen[key], list) and all(isinstance(n, str) for n in chosen[key])):
                raise explain("a list of names", repr(chosen[key])[:60], f"{key}: [head]", f"prune, {key}")
        step = chosen.get("round_to", "auto")
        if step != "auto" and (isinstance(step, str) or step < 1):
            raise explain("a number of at least 1, or auto", repr(step), "For example 8.", "prune, round_to")
        if self.batch is not None and (self.latency is None or self.batch < 1):
            got = f"{self.batch}" if self.latency is not None else f"{self.batch} without a latency"
            raise explain("a number of at least 1, with a latency", got, "For example 8.", "prune, batch")
        if self.mend is not None and self.mend < 1:
            raise explain("a number of batches of at least 1", repr(self.mend), "For example 16.", "prune, mend")
        over = {k: v for k in ("until", "regrow") if (v := getattr(self, k)) is not None}
        found = Step(budget, self.pattern, Schedule(self.schedule, self.rounds, **over), chosen)
        if self.fade is not None:
            require_fading(found, self.fade)
        return found


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs."""

    model: ModelPart
    data: DataPart
    prune: tuple[PrunePart, ...]
    train: TrainPart = field(default_factory=TrainPart)
    recover: RecoverPart = field(default_factory=RecoverPart)
    seeds: tuple[int, ...] = (0,)
    device: str = "auto"
    name: str = "run"
    about: str = ""

    def training(self, seed: int) -> Settings:
        part = self.train
        rate = Rate("rewind", part.anneal, part.warmup)
        return Settings(
            lr=part.lr,
            optimizer=part.optimizer,
            weight_decay=part.weight_decay,
            rate=rate,
            seed=seed,
            cpu=self.device == "cpu",
            repeatable=True,
        )

    def recovery(self, seed: int, step: int) -> Settings:
        part = self.recover
        return Settings(
            lr=part.lr if part.lr is not None else self.train.lr,
            optimizer=part.optimizer or self.train.optimizer,
            weight_decay=self.train.weight_decay if part.weight_decay is None else part.weight_decay,
            rate=Rate(part.rate, part.anneal, part.warmup),
            clip=part.clip or None,
            mixed_precision=part.mixed_precision,
            accumulate=part.accumulate,
            channels_last=part.channels_last,
            compile=part.compile,
            fused=part.fused,
            graph=part.graph,
            seed=seed * 1009 + step + 1,
            cpu=self.device == "cpu",
            repeatable=True,
        )

    def score(self) -> str:
        """What ranks channels or, where none are cut, weights."""
        cuts = [p for p in self.prune if not p.step().is_mask]
        return (cuts[0].score or "l1") if cuts else (self.prune[0].score or "magnitude")

    def digest(self) -> str:
        """Tells one recipe from another."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        return str(yaml.safe_dump(_plain(dataclasses.asdict(self)), sort_keys=False))


def read_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """A recipe file, or one of those that ship with Sapwood by name; ``changes`` are texts such as train.epochs=3."""
    file = Path(path)
    if not file.exists() and (SHIPPED / f"{path}.yaml").exists():
        file = SHIPPED / f"{path}.yaml"
    try:
        body = _read_yaml(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(shipped())
        raise explain("a recipe file", f"{path} ({error})", f"Or one of those that ship: {names}.", "run") from None
    except yaml.YAMLError as error:
        raise SapwoodError(f"{file}: expected YAML; {' '.join(str(error).split())[:200]}. Mend the file.") from None
    if not isinstance(body, dict):
        raise explain("a recipe: model, data, prune, ...", type(body).__name__, "See `sapwood recipes`.", str(file))
    for change in changes:
        _change(body, change)
    body.setdefault("name", file.stem)
    return _build(body, str(file))


def shipped() -> dict[str, str]:
    """The recipes that come with Sapwood, and what each is about."""
    return {f.stem: str(_read_yaml(f.read_text()).get("about", "")) for f in sorted(SHIPPED.glob("*.yaml"))}


def _build(body: dict[str, Any], where: str) -> Recipe:
    body = {k: v for k, v in body.items() if v is not None}
    for key in ("model", "data"):
        if isinstance(body.get(key), str):
            body[key] = {"name": body[key]}
    if isinstance(body.get("prune"), dict):
        body["prune"] = [body["prune"]]
    if type(body.get("seeds")) is int:
        body["seeds"] = list(range(body["seeds"]))
    if body.get("prune") == []:
        raise explain("at least one step", "an empty list", "prune: [{sparsity: 0.9}]", f"{where}, prune")
    missing = [k for k in ("model", "data", "prune") if not body.get(k)]
    if missing:
        raise explain(f"the key {missing[0]!r}", "none", "See `sapwood recipes` for examples.", where)
    parts: dict[str, Any] = {"model": ModelPart, "data": DataPart, "train": TrainPart, "recover": RecoverPart}
    for key, kind in parts.items():
        if key in body:
            body[key] = _part(kind, body[key], f"{where}, {key}")
    if not isinstance(body["prune"], list):
        raise explain("a list of steps", type(body["prune"]).__name__, "prune: [{sparsity: 0.9}]", f"{where}, prune")
    body["prune"] = tuple(_part(PrunePart, p, f"{where}, prune.{i}") for i, p in enumerate(body["prune"]))
    seeds = body.get("seeds", [0])
    good = isinstance(seeds, list) and seeds and all(type(s) is int and 0 <= s < 2**31 for s in seeds)
    if not good or len({*seeds}) < len(seeds):
        raise explain("a list of different whole numbers", repr(seeds), "seeds: [0, 1, 2]", f"{where}, seeds")
    body["seeds"] = tuple(seeds)
    recipe: Recipe = _part(Recipe, body, where)
    _require_sense(recipe, where)
    return recipe


def _require_sense(recipe: Recipe, where: str) -> None:
    """Say what is wrong with it now, not after an hour of training."""
    data, train, recover = recipe.data, recipe.train, recipe.recover
    limits = {
        "data.batch": (data.batch, data.batch >= 1, "at least 1"),
        "data.workers": (data.workers, data.workers >= 0, "at least 0"),
        "data.size": (data.size, data.size is None or data.size >= 1, "at least 1"),
        "train.epochs": (train.epochs, 0 < train.epochs < 1e6, "above 0"),
        "recover.fraction": (recover.fraction, 0 < recover.fraction <= 1, "above 0 and at most 1"),
        "recover.share": (recover.share, 0 < recover.share <= 1, "above 0 and at most 1"),
        "recover.temperature": (recover.temperature, 0 < recover.temperature < 1e6, "above 0"),
        "recover.clip": (recover.clip, recover.clip >= 0, "of at least 0, which does not clip"),
    }
    for key, (value, good, wanted) in limits.items():
        if not good:
            raise explain(f"a number {wanted}", repr(value), "Mend the recipe.", f"{where}, {key}")
    recipe.training(0)
    recovery = recipe.recovery(0, 0)
    for part in recipe.prune:
        if part.step().schedule.regrow:
            require_unscaled(recovery.mixed_precision)
    if not isinstance(recipe.model.arguments, Mapping):
        got = repr(recipe.model.arguments)[:60]
        raise explain("names and values", got, "model: {name: ..., arguments: {num_classes: 10}}", f"{where}, model")
    if recipe.device not in ("auto", "cpu", "cuda"):
        raise explain("auto, cpu or cuda", repr(recipe.device), "Mend the recipe.", f"{where}, device")
    if not re.fullmatch(r"[\w.+ -]{1,80}", recipe.name) or recipe.name.startswith("."):
        raise explain("a name of letters, digits, - and _", repr(recipe.name), "Mend it.", f"{where}, name")


def _part(kind: Any, body: Any, where: str) -> Any:
    if not isinstance(body, Mapping):
        raise explain("keys and values", repr(body)[:80], "Write key: value.", where)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in body.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1, 0.6)
            remedy = f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(fields)}."
            raise explain("a known key", repr(key), remedy, where)
        _require_kind(value, str(fields[key].type), f"{where}.{key}" if "," in where else f"{where}, {key}")
    try:
        return kind(**body)
    except TypeError as error:
        raise SapwoodError(f"{where}: {error}. Add what is missing.") from None


_SIMPLE: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}


def _require_kind(value: Any, wanted: str, where: str) -> None:
    """Numbers, texts and switches must be what they should be."""
    options = [w.strip() for w in wanted.split("|")]
    if not set(options) <= {*_SIMPLE, "None"} or (value is None and "None" in options):
        return
    number = isinstance(value, bool) and "bool" not in options
    if number or not any(isinstance(value, _SIMPLE[o]) for o in options if o != "None"):
        raise explain(" or ".join(o for o in options if o != "None"), repr(value)[:60], "Mend the recipe.", where)


def _change(body: dict[str, Any], change: str) -> None:
    """``train.epochs=3`` or ``prune.0.sparsity=0.8``."""
    path, found, text = change.partition("=")
    if not found or not path:
        raise explain("key=value", repr(change), "For example --set train.epochs=3.", "--set")
    *parents, last = path.split(".")
    try:
        value = _read_yaml(text)
    except yaml.YAMLError:
        raise explain("a value", repr(text), "For example --set train.epochs=3.", "--set") from None
    if isinstance(body.get("prune"), dict):
        body["prune"] = [body["prune"]]
    place: Any = body
    for part in parents:
        if isinstance(place, list):
            if not part.isdigit() or int(part) >= len(place):
                got = repr(part)
                raise explain(f"a number below {len(place)} in {path!r}", got, "Steps count from 0.", "--set")
            place = place[int(part)]
            continue
        if isinstance(place.get(part), str) and part in ("model", "data"):
            place[part] = {"name": place[part]}
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, (dict, list)):
            raise explain("keys", f"{part!r} is a value", "Check the path.", f"--set {change}")
    if isinstance(place, list):
        raise explain("a key", f"{path!r} names a list", "For example prune.0.sparsity.", "--set")
    place[last] = value


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML as people mean it: 2:4 is a text, 1e-3 is a number, and no key comes twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} comes twice")
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in entries if tag not in _NUMBERS]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_NUMBERS[0], re.compile(r"[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.\d*|\.\d+|\d[\d_]*)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
_Loader.add_implicit_resolver(_NUMBERS[1], _FLOAT, list("-+0123456789."))


def _read_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _plain(value: Any) -> Any:
    """Without what is not said, so that it reads like a recipe."""
    if isinstance(value, Mapping):
        return {k: v if k == "arguments" else _plain(v) for k, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
