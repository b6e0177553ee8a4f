"""The page in a real browser, as its reader meets it: on a desktop, on a phone, in the dark, by keyboard."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sapwood.reporting.page import write_page
from sapwood.reporting.serve import Server
from tests.browser import launched
from tests.test_report import EVIL, PAGES, changed, hostile

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
CHARTS = ("accuracy", "pareto", "channels", "scores", "staircase", "forms", "layers", "sensitivity")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(path, [PAGES / "half", PAGES / "zeros", PAGES / "bench.json"])
    return path


class Opened:
    """A page in a browser, with everything its console said."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(reduced_motion="reduce", **{"viewport": DESKTOP, **options})
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.page.on("console", lambda m: self.said.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.said.append(str(e)))
        self.page.on(
            "request",
            lambda r: None if r.url.startswith(("file:", "data:", "blob:", address)) else self.said.append(r.url),
        )
        self.page.goto(address)
        self.page.wait_for_selector("#chart-accuracy svg, #recipe")

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)

    def wait(self, script: str) -> None:
        """Until it is true; Playwright's own way needs eval, which the page does not allow."""
        end = time.monotonic() + 20
        while not self.ask(script):
            assert time.monotonic() < end, script
            self.page.wait_for_timeout(50)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))


MARKS = """() => Object.fromEntries([...Sap.charts].map(([name, chart]) =>
    [name, chart.getOption().series.reduce((sum, s) => sum + (s.data || []).length, 0)]))"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_renders_everywhere(browser: Any, page_file: Path, size: dict[str, int], theme: str) -> None:
    """Charts with data, no errors, nothing loaded, no sideways scrolling."""
    with Opened(browser, page_file.as_uri(), viewport=size, color_scheme=theme) as seen:
        marks = seen.ask(MARKS)
        assert set(marks) == set(CHARTS) and all(marks.values()), marks
        assert seen.ask("document.documentElement.dataset.theme") == theme
        assert seen.ask("document.documentElement.scrollWidth <= innerWidth") and not seen.said


@pytest.mark.parametrize(("size", "theme"), [(DESKTOP, "dark"), (PHONE, "light")], ids=["desktop", "phone"])
def test_it_can_be_read_by_a_screen_reader(browser: Any, page_file: Path, size: dict[str, int], theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    with Opened(browser, page_file.as_uri(), viewport=size, color_scheme=theme) as seen:
        seen.ask("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        found = axe.Axe().run(seen.page).response
        serious = [(v["id"], v["nodes"][0]["html"]) for v in found["violations"] if v["impact"] not in ("minor", None)]
        assert not serious and len(found["passes"]) > 20, serious
        names = seen.ask("[...document.querySelectorAll('.chart')].map((c) => c.getAttribute('aria-label'))")
        assert len(names) == len(CHARTS) and all(len(name) > 20 for name in names)


def test_the_top_tells_what_results_tell(browser: Any, page_file: Path) -> None:
    results = json.loads((PAGES / "half" / "results.json").read_text())
    measured, summary = results["measured"], results["summary"]
    with Opened(browser, page_file.as_uri()) as seen:

        def value(selector: str) -> float:
            return float(seen.page.get_attribute(selector, "data-value"))

        expected = {
            "accuracy": (summary["dense"]["mean"], summary["steps"][-1]["recovered"]["mean"]),
            "latency": tuple(measured["latency_ms"][k]["median"] for k in ("dense", "pruned")),
            "size": tuple(measured["file_bytes"][k] for k in ("dense", "pruned")),
        }
        for name, (dense, pruned) in expected.items():
            assert value(f".tile [data-dense={name}]") == dense and value(f".tile [data-figure={name}]") == pruned
        assert seen.text(".tile [data-figure=accuracy]").startswith(f"{100 * expected['accuracy'][1]:.1f}")
        assert f"{measured['speedup']:.2f} times as fast" in seen.text("#verdict")
        columns = seen.ask("[...document.querySelectorAll('.sides tbody tr')].map((r) => r.cells[1].dataset.value)")
        assert str(results["seeds"][-1]["steps"][-1]["params"]) in columns


def test_a_click_or_a_key_selects(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file.as_uri()) as seen:
        assert "tiny-half" in seen.text(".which") and seen.page.is_visible("#channels")
        place = seen.ask(
            """() => { const chart = Sap.charts.get("pareto"), option = chart.getOption();
            const index = option.series.findIndex((s) => s.name === "tiny-sparse: 90% zeros" && s.data.length === 1);
            const [x, y] = chart.convertToPixel({ seriesIndex: index }, option.series[index].data[0].value);
            document.getElementById("pareto").scrollIntoView({ behavior: "instant" });
            const box = document.getElementById("chart-pareto").getBoundingClientRect();
            return [box.x + x, box.y + y]; }"""
        )
        seen.page.mouse.move(*place)
        seen.page.wait_for_selector(".tip")
        assert "tiny-sparse: 90% zeros" in seen.text(".tip") and "latency" in seen.text(".tip")
        seen.page.mouse.click(*place)
        assert "tiny-sparse" in seen.text(".which") and "not in speed" in seen.text("#verdict")
        assert seen.page.is_visible("#zeros") and not seen.page.query_selector("#channels")
        assert seen.ask(MARKS)["zeros"] > 0
        seen.page.focus("#choose-v1")
        seen.page.keyboard.press("ArrowLeft")
        assert "tiny-half" in seen.text(".which") and seen.page.is_checked("#choose-v0")
        assert seen.ask("document.activeElement.id") == "choose-v0"
        seen.page.select_option("#pick-scores", "features.7")
        assert seen.ask(
            "Sap.rowsOf(Sap.state.page.sections.find((s) => s.id === 'scores')).every((r) => r[1] === 'features.7')"
        )
        assert not seen.said


def test_every_chart_can_be_had_as_csv(browser: Any, page_file: Path, tmp_path: Path) -> None:
    with Opened(browser, page_file.as_uri(), accept_downloads=True) as seen:
        tables = {s["id"]: s["table"] for s in seen.ask("Sap.state.page.sections")}
        assert set(CHARTS) <= set(tables)
        for name in (*CHARTS, "compare"):
            with seen.page.expect_download() as saved:
                seen.page.click(f"#csv-{name}")
            assert saved.value.suggested_filename == f"sapwood-{name}.csv"
            saved.value.save_as(tmp_path / name)
            head, *rows = csv.reader((tmp_path / name).read_text(encoding="utf-8-sig").splitlines())
            assert len(head) == len(tables[name]["columns"]) and len(rows) == len(tables[name]["rows"])
            for row, given in zip(rows, tables[name]["rows"], strict=True):
                assert [float(c) for c, v in zip(row, given) if isinstance(v, float)] == [
                    v for v in given if isinstance(v, float)
                ]
        assert seen.ask("Sap.csvCell('=1+1')") == "'=1+1" and seen.ask("Sap.csvCell('a,\"b\"')") == '"a,""b"""'
        assert not seen.said


def test_links_themes_and_paper(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file.as_uri() + "#layers") as seen:
        assert seen.ask("Math.abs(document.getElementById('layers').getBoundingClientRect().top) < 120")
        for link in seen.page.query_selector_all("#nav a"):
            assert seen.page.query_selector(link.get_attribute("href"))
        assert seen.ask("document.documentElement.dataset.theme") == "light"
        seen.page.click("text=Dark")
        assert seen.ask("document.documentElement.dataset.theme") == "dark"
        paper = seen.page.pdf(format="A4")
        assert paper.startswith(b"%PDF") and len(paper) > 20_000 and not seen.said


def test_names_are_shown_as_texts(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(path, [hostile(tmp_path / "evil"), PAGES / "zeros"])
    with Opened(browser, path.as_uri()) as seen:
        seen.ask("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert EVIL in seen.text("#recipe") and EVIL in seen.text(".card b") and EVIL in seen.text("#channels table")
        assert EVIL in str(seen.ask("document.getElementById('chart-channels').textContent")).replace("...", EVIL)
        seen.ask("Sap.charts.get('channels').dispatchAction({ type: 'showTip', seriesIndex: 0, dataIndex: 0 })")
        seen.page.wait_for_selector(".tip")
        assert EVIL in seen.text(".tip b")
        assert seen.ask("window.hacked") is None and not seen.page.query_selector("main img") and not seen.said


def test_charts_say_no_more_than_the_numbers(browser: Any, tmp_path: Path) -> None:
    """No zero for what is not a number, no dark cell for a loss of nothing, no axis with the same number twice."""

    def diverged(body: dict[str, Any]) -> None:
        body["summary"]["steps"][-1]["recovered"] = {"mean": math.nan, "spread": math.nan}
        for seed in body["seeds"]:
            seed["steps"][-1]["recovered"]["test"] = seed["steps"][-1]["curve"][-1]["test"] = math.nan
        for name, ms in (("dense", 0.1204), ("pruned", 0.0893)):
            body["measured"]["latency_ms"][name]["median"] = ms

    def long(body: dict[str, Any]) -> None:
        body["channels"] = [{**body["channels"][0], "name": f"layer {n}"} for n in range(60)]

    def flat(body: dict[str, Any]) -> None:
        for number, cell in enumerate(body["cells"]):
            cell["accuracy"] = body["dense"] - 0.0005 * number

    folder = changed(tmp_path / "run", diverged)
    changed(changed(folder, long, "details.json"), flat, "sensitivity.json")
    write_page(tmp_path / "report.html", [folder])
    with Opened(browser, (tmp_path / "report.html").as_uri()) as seen:
        lowest = (
            "Math.min(...Sap.charts.get('{}').getOption().series.flatMap((s) => s.data.map((d) => (d.value || d)[1])))"
        )
        assert seen.ask(lowest.format("accuracy")) > 5 and seen.ask(lowest.format("pareto")) > 90
        assert seen.text(".tile [data-dense=latency]") == "0.120 ms"
        assert seen.text(".tile [data-figure=latency]") == "0.0893ms"
        scale = seen.ask("(({ min, max }) => [min, max])(Sap.charts.get('sensitivity').getOption().visualMap[0])")
        assert scale[1] - scale[0] >= 20
        seen.page.select_option("#pick-scores", "features.0")
        texts = seen.ask("[...document.querySelectorAll('#chart-scores text')].map((t) => t.textContent)")
        ticks = [text for text in texts if re.fullmatch(r"\d\.\d+", text)]
        assert len(ticks) > 3 and len(set(ticks)) == len(ticks)
        seen.ask("document.getElementById('channels').scrollIntoView({ behavior: 'instant' })")
        before = seen.ask("scrollY")
        seen.page.mouse.move(640, 500)
        seen.page.mouse.wheel(0, 300)  # over a chart with a slider it moves the page, as everywhere
        seen.wait(f"scrollY > {before} + 100")
        assert not seen.said


def test_twenty_runs_are_no_jumble(browser: Any, tmp_path: Path) -> None:
    folders = []
    for number in range(20):
        folders.append(changed(tmp_path / str(number), lambda body, n=number: body.update(name=f"run {n}")))  # type: ignore[misc]
    write_page(tmp_path / "report.html", folders)
    start = time.monotonic()
    with Opened(browser, (tmp_path / "report.html").as_uri()) as seen:
        assert time.monotonic() - start < 10  # about one second by itself
        assert seen.ask("document.querySelectorAll('.card').length") == 20
        assert "And 8 more" in seen.text("#accuracy .notes li:last-child")  # none is left out in silence
        assert seen.text("#channels .notes").startswith("run 0: ") and "run 1: " not in seen.text("#channels .notes")
        arrows = seen.page.locator("#chart-accuracy text", has_text="1/").bounding_box()
        button = seen.page.locator("#csv-accuracy").bounding_box()
        assert arrows["x"] + arrows["width"] + 30 < button["x"] and not seen.said


def test_a_page_of_a_bench_alone(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(path, [PAGES / "bench.json"])
    with Opened(browser, path.as_uri()) as seen:
        assert seen.ask(MARKS)["forms"] > 10 and "CSR" in seen.text("#forms table")
        assert seen.ask("document.querySelectorAll('.tile').length") == 3 and not seen.said


def test_it_follows_a_run_that_goes_on(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(PAGES / "half", folder)
    first, *events = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    mine = json.dumps({**json.loads(first), "pid": os.getpid()}) + "\n"
    (folder / "results.json").rename(tmp_path / "results.json")
    (folder / "events.jsonl").write_text("".join([mine, *events[:3]]))
    with Server([folder]) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        with Opened(browser, server.url) as seen:
            before = seen.ask(MARKS)["accuracy"]
            assert "going on" in seen.text(".live.on") and "is being trained" in seen.text("#verdict")
            (folder / "events.jsonl").write_text("".join([mine, *events[:-2]]))
            seen.wait(f"Sap.charts.get('accuracy').getOption().series[0].data.length > {before}")
            (tmp_path / "results.json").rename(folder / "results.json")
            seen.wait("document.querySelector('.live').textContent === 'finished'")
            assert "times as fast" in seen.text("#verdict") and not seen.said
            button = seen.page.locator("#csv-accuracy").bounding_box()
            label = seen.page.locator("#chart-accuracy text", has_text="97.9%").bounding_box()
            assert label["y"] > button["y"] + button["height"]  # the one does not cover the other
            folder.rename(tmp_path / "away")
            seen.wait("document.querySelector('.live').textContent === 'the run cannot be read'")
            (tmp_path / "away").rename(folder)
            seen.wait("document.querySelector('.live').textContent === 'finished'")
        server.shutdown()
