"""staircase, and plans by latency, as a person runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sapwood.cli.common import parse_budget, parse_rounding
from sapwood.cli.main import main
from sapwood.errors import SapwoodError
from tests.test_cli_steps import NET, SHAPE, sapwood, told
from tests.test_latency import Clock, by_formula

CHAIN = ("tests.test_latency:chain", "--input", "2x3x8x8")
__all__ = ["by_formula"]


def test_staircase_tells_every_width(tmp_path: Path) -> None:
    out = tmp_path / "stairs.json"
    found = told("staircase", NET, *SHAPE, "--backend", "eager", "--shares", "0.5,0.75", "--seconds", 0.05, "-o", out)
    assert [round(s["channels"], 2) for s in found["stairs"]] == [1.0, 0.75, 0.5]
    assert found["batch"] == 2 and found["machine"]["device"]
    assert found["summary"][0].startswith("50% of the channels (")
    assert json.loads(out.read_text())["stairs"] == found["stairs"]
    shown = sapwood("staircase", NET, *SHAPE, "--backend", "eager", "--shares", "0.5", "--seconds", 0.05)
    assert shown.returncode == 0 and "Latency against width" in shown.stdout and "50% of the channels" in shown.stdout


def test_plan_with_steps_that_the_device_likes(tmp_path: Path) -> None:
    found = told("plan", NET, *SHAPE, "--budget", "channels=0.5", "--round-to", "auto", "-o", tmp_path / "plan.json")
    assert found["budget"]["round_to"].startswith("auto (")
    assert 0 < found["achieved"]["score_kept"] < 1


def test_options_that_make_no_difference_are_told(tmp_path: Path) -> None:
    budget = ("--budget", "channels=0.5", "-o", tmp_path / "plan.json")
    done = sapwood("plan", NET, *SHAPE, *budget, "--batch", 64, "--backend", "compile")
    assert done.returncode == 0
    assert "--batch, --backend: nothing is measured for a budget of channels" in done.stderr


def test_plan_by_latency(
    by_formula: Callable[[Clock], Clock],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_formula(Clock())
    out = tmp_path / "plan.json"
    words: list[Any] = ["sapwood", "plan", *CHAIN, "--budget", "latency=0.5", "-o", out, "--json"]
    monkeypatch.setattr("sys.argv", list(map(str, words)))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    left = found["achieved"]
    assert left["latency_ms"] <= 0.515 * left["dense_latency_ms"]
    assert json.loads(out.read_text())["achieved"]["latency_ms"] == left["latency_ms"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", NET, *SHAPE, "--budget", "latency=fast"), "a time; got latency='fast'"),
        (("plan", NET, *SHAPE, "--budget", "flops=0.5", "--round-to", "x"), "--round-to: expected a whole number"),
        (("staircase", NET, *SHAPE, "--shares", "2"), "--shares: expected fractions"),
        (("staircase", NET, *SHAPE, "--batch", "0"), "--batch: expected a batch of at least 1"),
        (("staircase", NET, *SHAPE, "--seconds", "0"), "seconds: expected a number of seconds above 0"),
        (("staircase", NET, *SHAPE, "--seconds", "nan"), "seconds: expected a number of seconds above 0"),
        (("staircase", NET, *SHAPE, "--backend", "fast"), "backend: expected auto or one of"),
        (("staircase", NET, "--input", "2x4x8x8"), "it raised RuntimeError"),
    ],
)
def test_bad_input_is_one_clear_line(words: tuple[str, ...], says: str) -> None:
    done = sapwood(*words)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_budgets_and_steps_are_read() -> None:
    assert parse_budget("latency=0.5").latency == 0.5 and parse_budget("latency=3.5ms").latency == "3.5ms"
    assert parse_rounding(None) is None and parse_rounding("auto") == "auto" and parse_rounding("16") == 16
    with pytest.raises(SapwoodError):
        parse_rounding("0")
