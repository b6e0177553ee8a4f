"""``sapwood report`` and ``sensitivity`` as a person runs them, but for the look of the page: see test_page.py."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import sapwood as sw
from sapwood.cli.main import main
from sapwood.measurement.layers import layer_times
from sapwood.pipeline.details import details_of
from sapwood.pipeline.histograms import channel_scores, weight_scores
from sapwood.pipeline.sensitivity import run_sensitivity, sensitivity
from sapwood.reporting.page import LARGEST, page_html, write_page
from sapwood.reporting.serve import Server
from sapwood.reporting.sources import distinct

PAGES = Path(__file__).parent / "data" / "pages"
EVIL = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"


Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """What a call of ``sapwood`` prints."""

    def call(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["sapwood", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, capsys.readouterr().err
        return capsys.readouterr().out

    return call


def data_of(page: Path) -> dict[str, Any]:
    """What a page shows, read from the page itself."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    body: dict[str, Any] = json.loads(found[1])
    return body


def section(page: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(s for s in page["sections"] if s["id"] == name)
    return found


def test_a_run_and_its_page_from_start_to_end(tmp_path: Path, said: Said) -> None:
    recipe = {
        "model": {"name": "sapwood.pipeline.models:SmallCNN", "arguments": {"width": 8}},
        "data": {"name": "digits", "batch": 256},
        "train": {"epochs": 2},
        "recover": {"fraction": 0.5},
        "prune": [{"channels": 0.5}],
        "device": "cpu",
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe))
    folder = tmp_path / "run"
    assert str(folder / "report.html") in said("run", tmp_path / "small.yaml", "--out", folder)
    page = data_of(folder / "report.html")
    shown = {s["id"] for s in page["sections"] if not s["missing"]}
    assert shown == {"compare", "accuracy", "pareto", "channels", "scores", "staircase", "layers"}
    assert "sapwood sensitivity run" in section(page, "sensitivity")["missing"]  # said, not shown empty
    assert "SmallCNN --input SHAPE --out bench.json" in section(page, "forms")["missing"]
    stages = [row[2] for row in section(page, "accuracy")["table"]["rows"]]
    assert stages.count("training") >= 3 and "pruned" in stages and stages[-1] == "recovery"
    frozen = [row for row in section(page, "channels")["table"]["rows"] if row[5] == "yes"]
    assert frozen and "output" in frozen[0][6]

    first = said("sensitivity", folder, "--shares", "0.5,0.9", "--batches", 1, "--json")
    assert len(json.loads(first)["cells"]) == 3 * 2
    assert "loses least" in said("sensitivity", folder, "--shares", "0.5,0.9", "--batches", 1)
    told = json.loads(said("report", folder, "--json"))
    assert "sensitivity" in told["sections"] and told["bytes"] == (folder / "report.html").stat().st_size < 3_000_000


def test_the_commands_of_the_docs(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, but for a shorter training of a smaller model."""
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs" / "report.md").read_text()
    short = ["train.epochs=1", "seeds=1", "model.arguments={width: 8}", "device=cpu"]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert len(lines) >= 5
    for line in lines:
        _, *words = line.partition("#")[0].split()
        said(*words, *(w for s in short for w in ("--set", s) if words[0] == "run"))
    assert [c["title"] for c in data_of(tmp_path / "both.html")["cards"]] == [
        "digits-channels: 50% of channels left",
        "digits-sparse: 90% zeros",
    ]
    assert section(data_of(tmp_path / "runs" / "half" / "report.html"), "sensitivity")["table"]["rows"]


def test_numbers_equal_results(tmp_path: Path) -> None:
    """Every figure at the top and in the tables is one of results.json, to the last digit."""
    page, results = tmp_path / "page.html", json.loads((PAGES / "half" / "results.json").read_text())
    write_page(page, [PAGES / "half"])
    shown = data_of(page)
    accuracy, latency, size = shown["cards"][0]["tiles"]
    summary, measured = results["summary"], results["measured"]
    assert (accuracy["dense"], accuracy["pruned"]) == (
        summary["dense"]["mean"],
        summary["steps"][-1]["recovered"]["mean"],
    )
    assert latency["dense"] == measured["latency_ms"]["dense"]["median"]
    assert latency["pruned"] == measured["latency_ms"]["pruned"]["median"]
    assert {"dense": size["dense"], "pruned": size["pruned"]} == measured["file_bytes"]
    assert f"{measured['speedup']:.2f} times as fast" in shown["cards"][0]["verdict"]
    points = {row[1]: row for row in section(shown, "pareto")["table"]["rows"] if "dense" not in row[0]}
    for seed in results["seeds"]:
        row = points[str(seed["seed"])]
        assert row[2] == seed["steps"][-1]["recovered"]["test"]
        assert row[3] == measured["seeds"][str(seed["seed"])]["median"]
    journey = [row[4] for row in section(shown, "accuracy")["table"]["rows"] if row[2] in ("pruned", "recovery")]
    assert journey == [p["test"] for s in results["seeds"] for step in s["steps"] for p in step["curve"]]
    details = json.loads((PAGES / "half" / "details.json").read_text())
    kept = [(row[1], row[3]) for row in section(shown, "channels")["table"]["rows"]]
    assert kept == [(c["name"], c["kept"]) for c in details["channels"]]
    assert shown["runs"][0]["recipe"] == (PAGES / "half" / "recipe.yaml").read_text()
    assert shown["runs"][0]["environment"]["torch"] == results["environment"]["torch"]


def test_several_runs_and_a_bench_side_by_side(tmp_path: Path) -> None:
    shown = write_page(tmp_path / "page.html", [PAGES / "half", PAGES / "zeros", PAGES / "bench.json"])
    assert [c["title"] for c in shown["cards"]] == ["tiny-half: 50% of channels left", "tiny-sparse: 90% zeros"]
    assert [c["tone"] for c in shown["cards"]] == ["good", "mixed"] and shown["chosen"] == "v0"
    assert "paid in size, not in speed" in shown["cards"][1]["verdict"]
    forms = section(shown, "forms")["table"]["rows"]
    assert {"dense", "zeros", "CSR", "cut"} <= {row[2] for row in forms}
    assert any("2:4" in note for note in section(shown, "forms")["notes"])
    assert distinct([("a", "x"), ("a", "y"), ("b", "z"), ("a", "x")]) == ["a (x)", "a (y)", "b", "a (x) #2"]


def test_the_front_is_what_nothing_beats(tmp_path: Path) -> None:
    shown = write_page(tmp_path / "page.html", [PAGES / "half", PAGES / "zeros"])
    means = [row for row in section(shown, "pareto")["table"]["rows"] if row[1] == "mean"]
    for row in means:
        beaten = any(o[2] >= row[2] and o[3] <= row[3] and o[2:4] != row[2:4] for o in means)
        assert row[7] == ("no" if beaten else "yes")


def changed(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "results.json") -> Path:
    """The run with channels cut, with one of its files changed."""
    if not folder.exists():
        shutil.copytree(PAGES / "half", folder)
    body = json.loads((folder / name).read_text())
    change(body)
    (folder / name).write_text(json.dumps(body))
    return folder


def clocked(speed: float, low: float, high: float) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["measured"].update(speedup=speed, speed_interval=[low, high])


def recovered_to(accuracy: float) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["summary"]["steps"][-1].update(recovered={"mean": accuracy, "spread": 0 * accuracy})


@pytest.mark.parametrize(
    ("change", "words", "tone"),
    [
        (clocked(1.41, 0.68, 2.28), "in size, and the speed is too noisy to tell: a file", "mixed"),
        (clocked(math.inf, math.nan, math.inf), "too noisy to tell", "mixed"),
        (clocked(0.7, 0.69, 0.71), "It paid in size, and it got slower", "mixed"),
        (clocked(1.0, 0.99, 1.01), "It paid in size, not in speed", "mixed"),
        (recovered_to(0.5), "It cost too much: 48.8 points less accuracy; 3.13 times as fast, a file", "bad"),
        (recovered_to(math.nan), "It failed: its accuracy is not a number; 3.13 times as fast", "bad"),
    ],
)
def test_the_verdict_is_what_was_measured(change: Any, words: str, tone: str, tmp_path: Path) -> None:
    shown = write_page(tmp_path / "page.html", [changed(tmp_path / "run", change)])
    card = shown["cards"][0]
    assert words in card["verdict"] and card["tone"] == tone
    said = [card["verdict"], *(t["change"] + t["note"] for t in card["tiles"])]
    said += [note for s in shown["sections"] for note in s["notes"]]
    assert not re.search(r"\b(nan|inf)\b", " ".join(said))


def test_in_rounds_the_drop_marked_is_not_the_drop_told(tmp_path: Path) -> None:
    """The curve has the first round, results tell what was left after the last: the page says which is which."""

    def in_rounds(body: dict[str, Any]) -> None:
        for seed in body["seeds"]:
            seed["steps"][0]["prune"].update(schedule="iterative", rounds=3)

    accuracy = section(write_page(tmp_path / "page.html", [changed(tmp_path / "run", in_rounds)]), "accuracy")
    assert "points down after 3 rounds of pruning, the first of them marked" in accuracy["notes"][0]
    assert list(accuracy["chart"]["rounds"].values()) == [3]


def test_a_noisy_bench_promises_nothing(tmp_path: Path) -> None:
    bench = json.loads((PAGES / "bench.json").read_text())
    for row in (row for point in bench["points"] for row in point["rows"][1:]):
        row["timing"].update(speed=1.4, speed_low=0.7, speed_high=2.2)
    bench["summary"] = ["too noisy to decide"]
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    card = write_page(tmp_path / "page.html", [tmp_path / "bench.json"])["cards"][0]
    assert "too noisy to tell" in card["verdict"]
    assert {(t["tone"], t["change"]) for t in card["tiles"]} == {("same", "nothing is surely faster")}


def test_what_paid_in_part_is_shown_before_what_did_not(tmp_path: Path) -> None:
    bad = changed(tmp_path / "bad", recovered_to(0.5))
    shown = write_page(tmp_path / "page.html", [bad, PAGES / "zeros"])
    assert [c["tone"] for c in shown["cards"]] == ["bad", "mixed"] and shown["chosen"] == "v1"


def hostile(folder: Path) -> Path:
    """A run whose every text tries to be a script."""
    shutil.copytree(PAGES / "half", folder)
    for name in ("results.json", "details.json", "sensitivity.json"):
        body = json.loads((folder / name).read_text())
        if name == "results.json":
            body["name"] = EVIL
            body["environment"]["device"] = EVIL
        for row in body.get("channels", ()):
            row["name"] = row["reason"] = EVIL + row["name"]
        for row in body.get("cells", ()):
            row["group"] = EVIL + row["group"]
        for part in body.get("scores", {}).get("of", ()):
            part["name"] = part["name"] if part["name"] == "all" else EVIL
        for layer in body.get("layers", {}).get("layers", ()):
            layer["layer"] = layer["kind"] = EVIL + layer["layer"]
        (folder / name).write_text(json.dumps(body))
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace("sapwood.pipeline.models:SmallCNN", f"'<script>{EVIL}'"))
    return folder


def test_names_stay_texts(tmp_path: Path) -> None:
    """Nothing of a name reaches the page's markup; the browser test looks at what becomes of it."""
    page = tmp_path / "page.html"
    write_page(page, [hostile(tmp_path / "evil")], title=EVIL)
    text = page.read_text()
    markup = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # without our own scripts
    assert EVIL not in text and "<img" not in markup and "window.hacked=1</script>" not in text
    assert data_of(page)["runs"][0]["label"] == EVIL and EVIL in data_of(page)["runs"][0]["recipe"]
    assert re.search(r'Content-Security-Policy" content="default-src &#x27;none&#x27;', text)
    assert "http" not in markup.replace("http-equiv", "")


def test_a_large_model_still_fits(tmp_path: Path) -> None:
    folders = []
    for number in range(6):
        folders.append(tmp_path / f"run-{number}")
        shutil.copytree(PAGES / "half", folders[-1])
        file = folders[-1] / "details.json"
        body = json.loads(file.read_text())
        part = body["scores"]["of"][0]
        full = {"kept": [7] * len(part["kept"]), "removed": [5] * len(part["kept"])}
        body["scores"]["of"] = [{**part, **full, "name": n} for n in ("all", *(f"a.long.name.{i}" for i in range(300)))]
        file.write_text(json.dumps(body))
    page = tmp_path / "page.html"
    shown = write_page(page, folders)
    assert page.stat().st_size <= LARGEST < 3_000_000
    assert any("left out" in note for note in section(shown, "scores")["notes"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: None, "a folder without"),
        (lambda f: (f / "results.json").write_text("{"), "damaged"),
        (lambda f: (f / "results.json").write_text("[]"), "a list"),
        (lambda f: (f / "results.json").write_text('{"summary": {}}'), "Make them anew"),
        (lambda f: (f / "bench.json").write_text('{"what": {}, "points": 7}'), "Make them anew"),
    ],
)
def test_what_is_no_run_is_one_clear_line(make: Any, words: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(sw.SapwoodError, match=words):
        write_page(tmp_path / "page.html", [tmp_path])
    assert not (tmp_path / "page.html").exists()


def test_wrong_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.json").write_text('{"hello": 1}')
    (tmp_path / "empty.json").touch()
    for args, words in (
        (["report", "nowhere"], "neither"),
        (["report", str(tmp_path / "other.json")], "something else"),
        (["report", str(tmp_path / "empty.json")], "an empty file"),
        (["report", str(PAGES / "half"), "--serve", "--json"], "--serve alone"),
        (["report", str(PAGES / "half"), "--serve", "--port", "99999"], "a free port"),
        (["sensitivity", str(tmp_path)], "recipe.yaml"),
        (["sensitivity", str(PAGES / "half")], "none yet"),
        (["sensitivity", str(PAGES / "half"), "--batches", "0"], "at least one batch"),
        (["sensitivity", str(PAGES / "half"), "--shares", "2"], "--shares"),
    ):
        monkeypatch.setattr(sys, "argv", ["sapwood", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr().err
        assert ended.value.code == 2 and words in told and told.count("\n") == 1, told


def test_a_stopped_run_tells_what_it_knows(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(PAGES / "half", folder)
    (folder / "results.json").unlink()
    (folder / "details.json").unlink()
    shown = write_page(tmp_path / "page.html", [folder])
    card = shown["cards"][0]
    assert "stopped" in card["verdict"] and card["tone"] == "open" and card["tiles"][0]["dense"] > 0.5
    assert section(shown, "accuracy")["table"]["rows"] and section(shown, "pareto")["missing"]


def test_the_server_is_for_this_machine_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(PAGES / "half", folder)
    with Server([folder]) as server:
        assert server.server_address[0] == "127.0.0.1"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        host, port = server.server_address[0], server.server_address[1]

        def ask(path: str, name: str) -> tuple[int, str]:
            link = http.client.HTTPConnection(str(host), port, timeout=10)
            link.request("GET", path, headers={"Host": name})
            answer = link.getresponse()
            return answer.status, answer.read().decode()

        assert ask("/", f"localhost:{port}")[0] == 200
        for name in ("evil.example", f"evil.example:{port}", "127.0.0.1", ""):
            assert ask("/data.json", name)[0] == 403
        assert ask("/results.json", f"127.0.0.1:{port}")[0] == 404
        assert ask("/../recipe.yaml", f"127.0.0.1:{port}")[0] == 404
        status, text = ask("/data.json", f"127.0.0.1:{port}")
        assert status == 200 and json.loads(text)["live"]["words"] == "finished"
        server.shutdown()


def test_a_browser_that_goes_away_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    with Server([PAGES / "half"]) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        for _ in range(2):
            link = socket.create_connection(("127.0.0.1", server.server_address[1]))
            link.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.server_address[1]}\r\n\r\n".encode())
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # gone at once
            link.close()
        next_one = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        next_one.request("GET", "/")
        assert next_one.getresponse().read()
        for thread in [t for t in threading.enumerate() if "process_request" in t.name]:
            thread.join(10)
        server.shutdown()
    assert not capfd.readouterr().err


def test_serve_ends_with_control_c() -> None:
    command = [sys.executable, "-m", "sapwood.cli.main", "report", str(PAGES / "half"), "--serve"]
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **heard)  # type: ignore[call-overload]
    assert process.stdout is not None
    assert re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and "stopped" in errors and "Traceback" not in errors


class Halves(nn.Module):
    """Two branches of which only one counts: ``idle`` is multiplied by zero, ``busy`` decides."""

    def __init__(self) -> None:
        super().__init__()
        self.busy, self.idle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.read_busy, self.read_idle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            for layer in (self.busy, self.read_busy):
                layer.weight.copy_(torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])))
            self.read_idle.weight.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read_busy(self.busy(x)) + self.read_idle(self.idle(x))  # type: ignore[no-any-return]


def labels_kept(model: nn.Module) -> float:
    """Inputs are unit vectors: a class is right while its channel is there."""
    with torch.no_grad():
        found = model(torch.eye(4))
    return sum(float(found[i, i] > 0) for i in range(4)) / 4


def test_sensitivity_of_what_counts_and_what_does_not() -> None:
    known: list[dict[str, Any]] = []
    model = Halves()
    cells = sensitivity(model, torch.randn(2, 4), labels_kept, (0.25, 0.5, 0.75), on_cell=known.append)
    found = {(c["group"], c["share"]): c["accuracy"] for c in cells}
    busy, idle = "busy", "idle"
    assert {g for g, _ in found} == {busy, idle}
    for share in (0.25, 0.5, 0.75):
        assert found[busy, share] == 1 - share and found[idle, share] == 1.0
    assert labels_kept(model) == 1.0 and known == cells  # the model given is as it was

    def never(_: nn.Module) -> float:
        raise AssertionError("all cells are known")

    assert sensitivity(model, torch.randn(2, 4), never, (0.25, 0.5, 0.75), known=known) == cells


def halves() -> nn.Module:
    return Halves()


def loaders() -> dict[str, Any]:
    x, y = torch.eye(4), torch.arange(4)
    return {"train": [(x, y)], "validation": [(x, y), (x, y)], "test": [(x, y)], "example": x[:2]}


def test_sensitivity_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    names = {"model": {"name": "tests.test_report:halves"}, "data": {"name": "tests.test_report:loaders"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**names, "prune": [{"channels": 0.5}], "device": "cpu"}))
    (tmp_path / "seed-0").mkdir()
    save_file(Halves().state_dict(), tmp_path / "seed-0" / "dense.safetensors")

    def stop(what: str, done: int, of: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sensitivity(tmp_path, 1, (0.25, 0.5), tell=stop)
    half = json.loads((tmp_path / "sensitivity.json").read_text())
    assert len(half["cells"]) == 3 and not half["done"] and half["dense"] == 1.0
    half["cells"][0]["accuracy"] = 0.123  # what is known is not computed again
    (tmp_path / "sensitivity.json").write_text(json.dumps(half))
    whole = run_sensitivity(tmp_path, 1, (0.25, 0.5))
    # two of four classes are gone, but of nothing but zeros the largest is the first: that one is right by chance
    assert [c["accuracy"] for c in whole["cells"]] == [0.123, 0.75, 1.0, 1.0] and whole["done"]
    with pytest.raises(sw.SapwoodError, match=r"batches 1 in what is there.*--anew"):
        run_sensitivity(tmp_path, 2, (0.25, 0.5))
    assert run_sensitivity(tmp_path, 2, (0.25,), anew=True)["cells"][0]["accuracy"] == 1.0


def test_stopped_it_says_how_to_go_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same options: with others it would not go on."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sapwood.cli.sensitivity.run_sensitivity", stop)
    monkeypatch.setattr(sys, "argv", ["sapwood", "sensitivity", "a run", "--shares", "0.5", "--seed", "0", "--anew"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 130 and "sapwood sensitivity 'a run' --shares 0.5 --batches 4 --seed 0\n" in told


def test_a_part_that_fails_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a model nobody thought of")

    monkeypatch.setattr("sapwood.pipeline.details.channels_of", fail)
    monkeypatch.setattr("sapwood.pipeline.details.QUICK_MS", 0.0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4)
    done = sw.prune(model, x, sw.Budget(channels=0.5))
    found = details_of(model, done.model, done.plan, "l1", x, x, seconds=0.01)
    assert "nobody thought of" in found["left_out"]["channels"] and "channels" not in found
    assert found["left_out"]["staircase"].startswith("a forward takes") and found["scores"] and found["layers"]


def test_histograms_split_at_the_cut() -> None:
    scores = [np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.5, 5.0])]
    found = channel_scores(["a", "b"], scores, [[2, 3], [0, 1]], "l1")
    whole, first, second = found["of"]
    assert (sum(whole["kept"]), sum(whole["removed"])) == (4, 2) and first["cut"] == 2.5 and second["cut"] is None
    before, after = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        before.weight.copy_(torch.tensor([[0.1, -0.4, 0.2, 0.8]]))
        after.weight.copy_(before.weight)
    sw.mask_(after, sw.Budget(sparsity=0.5))
    part = weight_scores(before, after, "magnitude")["of"][0]
    assert (sum(part["kept"]), sum(part["removed"])) == (2, 2) and part["cut"] == pytest.approx(0.3)


def test_time_by_layer_is_where_the_work_is() -> None:
    slow, quick = nn.Linear(1500, 1500), nn.Linear(1500, 2)
    model = nn.Sequential(slow, nn.ReLU(), quick)
    found = layer_times({"dense": model}, ((torch.randn(64, 1500),), {}), seconds=0.05)
    times = {row["layer"]: row["ms"]["dense"] for row in found["layers"]}
    assert list(times) == ["", "0", "1", "2"] and times["0"] == max(times.values())
    assert not slow._forward_hooks and not slow._forward_pre_hooks


def test_what_the_page_is_made_of_is_in_the_package() -> None:
    import sapwood.reporting.page as page

    for name in (*page.SCRIPTS, "page.html", "page.css", "LICENSE-echarts.txt"):
        assert (page.ASSETS / name).stat().st_size
    assert "reporting/assets/*" in (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert os.path.getsize(page.ASSETS / "echarts.min.js") < 1_500_000
    assert page_html({"live": None, "title": "@@STYLE@@ @@DATA@@"}).count('id="data"') == 1
