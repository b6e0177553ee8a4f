"""Sizes as linear forms of how many channels each group keeps, and the equations between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sapwood.capture.sizes import Attr, Expr, Op, Width
from sapwood.capture.tracker import leaves


@dataclass(frozen=True)
class Form:
    """constant + sum of coefficient x kept channels of a group."""

    constant: int = 0
    terms: tuple[tuple[int, int], ...] = ()  # (group number, coefficient), sorted, no zeros

    @staticmethod
    def of(constant: int, terms: Mapping[int, int]) -> Form:
        return Form(constant, tuple(sorted((g, c) for g, c in terms.items() if c)))

    def __add__(self, other: Form) -> Form:
        terms = dict(self.terms)
        for group, coefficient in other.terms:
            terms[group] = terms.get(group, 0) + coefficient
        return Form.of(self.constant + other.constant, terms)

    def scaled(self, factor: int) -> Form:
        return Form.of(self.constant * factor, {g: c * factor for g, c in self.terms})

    def __sub__(self, other: Form) -> Form:
        return self + other.scaled(-1)

    def divided(self, factor: int) -> Form | None:
        if factor == 0 or self.constant % factor or any(c % factor for _, c in self.terms):
            return None
        return Form.of(self.constant // factor, {g: c // factor for g, c in self.terms})

    def value(self, kept: Mapping[int, int] | list[int]) -> int:
        return self.constant + sum(c * kept[g] for g, c in self.terms)


@dataclass
class System:
    """Equations between sizes. ``solve`` finds attribute forms, constraints and what must freeze."""

    widths: Mapping[int, Form]
    values: Mapping[Expr, int]  # dense values of attributes
    attributes: dict[Expr, Form] = field(default_factory=dict)
    constraints: list[tuple[Form, str]] = field(default_factory=list)  # each form must be zero
    freeze: list[tuple[set[int], str]] = field(default_factory=list)

    def solve(self, equations: list[tuple[Expr, Expr, str]]) -> None:
        waiting = sorted(equations, key=lambda e: not _is_bare(e[0], e[1]))
        while waiting:
            later = [e for e in waiting if not self._settle(*e)]
            if len(later) == len(waiting):
                open_ = [a for e in later for a in self._unknowns(e[0], e[1])]
                if not open_:
                    break
                unknown = min(open_, key=lambda a: self.values.get(a, 0))  # widths are the larger numbers
                self.attributes[unknown] = Form(self.values.get(unknown, 0))
            waiting = later

    def _unknowns(self, left: Expr, right: Expr) -> list[Attr]:
        found = [*leaves(left), *leaves(right)]
        return [a for a in found if isinstance(a, Attr) and a not in self.attributes]

    def _settle(self, left: Expr, right: Expr, where: str) -> bool:
        """Use one equation; False when too much in it is still unknown."""
        for expr, other in ((left, right), (right, left)):
            if isinstance(expr, Op) and expr.symbol == "//":
                return self._settle(expr.left, Op("*", other, expr.right), where)
            if isinstance(expr, Op) and expr.symbol == "%":
                return True  # divisibility holds whenever the sizes themselves do
        unknown = self._unknowns(left, right)
        if len(unknown) > 1:
            return False
        if unknown:
            self._define(unknown[0], left, right, where)
            return True
        a, b = self.form(left), self.form(right)
        if a is None or b is None:
            self._freeze(left, right, where)
        elif a != b:
            self._constrain(a - b, where)
        return True

    def _constrain(self, difference: Form, where: str) -> None:
        groups = {g for g, _ in difference.terms}
        if len(groups) == 1:
            self.freeze.append((groups, f"a size is fixed by the code: {where}"))
        elif groups:
            self.constraints.append((difference, where))

    def _freeze(self, left: Expr, right: Expr, where: str) -> None:
        groups: set[int] = set()
        for leaf in [*leaves(left), *leaves(right)]:
            form = self.widths[leaf.vector] if isinstance(leaf, Width) else self.attributes.get(leaf)
            groups |= {g for g, _ in form.terms} if form else set()
        if groups:
            self.freeze.append((groups, f"code computes its size in a way we cannot follow: {where}"))

    def _define(self, name: Attr, left: Expr, right: Expr, where: str) -> None:
        """Isolate the one unknown attribute of an equation."""
        if name in leaves(right):
            left, right = right, left
        target = self.form(right)
        expr = left
        while target is not None and isinstance(expr, Op):
            inside_left = name in leaves(expr.left)
            known = self.form(expr.right if inside_left else expr.left)
            if known is None:
                target = None
            elif expr.symbol == "+":
                target = target - known
            elif expr.symbol == "-":
                target = target + known if inside_left else known - target
            elif expr.symbol == "*":
                target = target.divided(known.constant) if not known.terms else _ratio(target, known)
            elif expr.symbol == "//" and inside_left:
                target = product(target, known)
            else:
                target = None
            expr = expr.left if inside_left else expr.right
        if target is None or expr != name:
            self.attributes[name] = Form(self.values.get(name, 0))
            self._freeze(left, right, where)
        else:
            self.attributes[name] = target

    def form(self, expr: Expr) -> Form | None:
        """The linear form of an expression; None when it is unknown or not linear."""
        if isinstance(expr, int):
            return Form(expr)
        if isinstance(expr, Width):
            return self.widths[expr.vector]
        if isinstance(expr, Attr):
            return self.attributes.get(expr)
        if expr.symbol == "*":  # (a // b) * b, as in assertions, is a wherever it holds
            for one, two in ((expr.left, expr.right), (expr.right, expr.left)):
                if isinstance(one, Op) and one.symbol == "//" and one.right == two:
                    return self.form(one.left)
        left, right = self.form(expr.left), self.form(expr.right)
        if left is None or right is None:
            return None
        if expr.symbol == "+":
            return left + right
        if expr.symbol == "-":
            return left - right
        if expr.symbol == "*":
            return product(left, right)
        if not left.terms and not right.terms and right.constant:
            folded = left.constant // right.constant, left.constant % right.constant
            return Form(folded[0] if expr.symbol == "//" else folded[1])
        if expr.symbol == "//" and not right.terms:
            return left.divided(right.constant)
        return _ratio(left, right) if expr.symbol == "//" else None


def _is_bare(left: Expr, right: Expr) -> bool:
    """attribute == size, the plainest way to define an attribute."""
    return isinstance(left, (Attr, Width)) and isinstance(right, (Attr, Width))


def product(left: Form, right: Form) -> Form | None:
    if not left.terms:
        return right.scaled(left.constant)
    return left.scaled(right.constant) if not right.terms else None


def _ratio(top: Form, bottom: Form) -> Form | None:
    """top / bottom when it is the same number whatever is kept."""
    base = bottom.terms[0][1] if bottom.terms else bottom.constant
    over = dict(top.terms).get(bottom.terms[0][0], 0) if bottom.terms else top.constant
    if base == 0 or over % base:
        return None
    return Form(over // base) if bottom.scaled(over // base) == top else None
