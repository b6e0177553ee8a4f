"use strict";
/* Puts the page together; chosen models, picked groups, the theme, live updates. */
(function () {
  const el = Sap.el, state = Sap.state, MOST_NOTES = 12;

  function tile(one) {
    const [number, unit] = Sap.parts(one.pruned, one.unit, larger(one));
    const known = one.pruned !== null && one.pruned !== undefined;
    const box = el("div", { class: "tile " + one.tone }, el("h2", {}, one.name),
      el("p", { class: known ? "big" : "big none", "data-value": one.pruned, "data-figure": one.name.toLowerCase() }, number, unit ? el("small", {}, unit) : null),
      el("p", { class: "change" }, one.change || (known ? "" : "not known yet")));
    if (one.dense !== null && one.dense !== undefined) box.append(tracks(one, known));
    box.append(el("p", { class: "note" }, one.note));
    return box;
  }

  const larger = (one) => Math.max(one.dense || 0, one.pruned || 0);

  function tracks(one, known) {
    const most = one.unit === "percent" ? 1 : Math.max(one.dense, one.pruned || 0) || 1;
    const bar = (value, kind) => { const made = el("i", { class: kind }); made.style.width = (100 * value) / most + "%"; return made; };
    const lines = [el("span", {}, "dense"), bar(one.dense, ""), el("span", { "data-value": one.dense, "data-dense": one.name.toLowerCase() }, Sap.text(one.dense, one.unit, larger(one)))];
    if (known) lines.push(el("span", {}, one.label || "pruned"), bar(one.pruned, "p"), el("span", {}, Sap.text(one.pruned, one.unit, larger(one))));
    return el("div", { class: "track" }, ...lines);
  }

  function header(page) {
    const card = Sap.chosenCard(), top = document.getElementById("top");
    const tools = [el("button", { type: "button", onclick: toggleTheme, "aria-label": "Switch between light and dark" }, Sap.isDark() ? "Light" : "Dark"),
      el("button", { type: "button", class: "wide", onclick: () => window.print() }, "Print")];
    const bar = el("div", { class: "bar" }, el("span", { class: "brand" }, "Sapwood"), page.live ? live(page.live) : null, ...tools);
    const parts = [bar, el("h1", {}, page.title)];
    if (card) {
      parts.push(el("p", { class: card.verdict.length > 120 ? "verdict long" : "verdict", id: "verdict" }, card.verdict));
      if (page.cards.length > 1) parts.push(el("p", { class: "which" }, "Shown: " + card.title));
      parts.push(el("div", { class: "tiles" }, ...card.tiles.map(tile)));
    }
    top.replaceChildren(...parts);
  }

  function live(told) {
    return el("span", { class: told.running ? "live on" : "live" }, el("i", { "aria-hidden": "true" }), told.words);
  }

  function cards(page) {
    const one = (card) => {
      const radio = el("input", { type: "radio", name: "variant", value: card.id, id: "choose-" + card.id, onchange: () => Sap.choose(card.id) });
      radio.checked = card === Sap.chosenCard();
      const heads = [el("dt", {}, ""), el("dd", { class: "head" }, "dense"), el("dd", { class: "head" }, "pruned")];
      const lines = card.tiles.flatMap((t) => [el("dt", {}, t.name), el("dd", {}, Sap.text(t.dense, t.unit, larger(t))), el("dd", { class: t.tone }, Sap.text(t.pruned, t.unit, larger(t)))]);
      return el("label", { class: "card" }, radio, el("b", {}, card.title), el("dl", {}, ...heads, ...lines), el("p", {}, card.verdict));
    };
    return el("fieldset", { class: "cards" }, el("legend", { class: "unseen" }, "Which model to show; dense and pruned"), ...page.cards.map(one));
  }

  /* Zeros of a model that was cut, or channels of one that was masked, are nothing to show. */
  const shown = (page) => page.sections.filter((s) => s.missing || !["zeros", "channels"].includes(s.id) || Sap.rowsOf(s).length);

  function section(one, page) {
    const id = one.id + "-title";
    const box = el("section", { id: one.id, "aria-labelledby": id },
      el("h2", { class: "head", id }, one.title, el("a", { href: "#" + one.id, "aria-label": "Link to: " + one.title }, "#")));
    if (one.lead && !one.missing) box.append(el("p", { class: "lead" }, one.lead));
    if (one.missing) { box.append(el("p", { class: "missing" }, one.missing)); return box; }
    if (one.id === "compare" && page.cards.length > 1) box.append(cards(page));
    const rows = Sap.rowsOf(one), panel = el("div", { class: "panel" });
    panel.append(tools(one, rows));
    if (one.chart && Sap.drawnOf(one).length) {
      panel.append(el("div", { class: "chart", id: "chart-" + one.id, role: "img", "aria-label": `${one.title}. ${one.chart.alt}` }));
    } else if (one.chart) {
      panel.append(el("p", { class: "missing" }, rows.length ? "There is no number to draw here." : `Nothing of this kind for ${Sap.chosenCard().title}: choose another model above.`));
    }
    panel.append(one.chart ? Sap.foldedTable(one, one.id === "forms") : Sap.sideBySide(one));
    box.append(panel);
    const notes = notesOf(one, page);
    if (notes.length) box.append(el("ul", { class: "notes" }, ...notes.map((n) => el("li", {}, n))));
    return box;
  }

  /* In a section about one model, no notes about the others; of very many, that there are more. */
  function notesOf(one, page) {
    const others = one.by_variant ? page.cards.filter((c) => c !== Sap.chosenCard()) : [];
    const left = one.notes.filter((n) => !others.some((c) => n.startsWith(c.title + ": ")));
    return left.length > MOST_NOTES ? [...left.slice(0, MOST_NOTES), `And ${left.length - MOST_NOTES} more, as in the table.`] : left;
  }

  function tools(one, rows) {
    const box = el("div", { class: "tools" }), card = Sap.chosenCard();
    if (one.by_variant && card && state.page.cards.length > 1) box.append(el("span", { class: "name" }, card.title));
    if (one.chart && one.chart.pick !== undefined) {
      const left = one.by_variant && card ? one.table.rows.filter((r) => r[0] === card.title) : one.table.rows;
      const options = Sap.optionsIn(one, left);
      if (options.length > 1) {
        const choice = el("select", { id: "pick-" + one.id, onchange: (e) => { state.picks[one.id] = options[e.target.selectedIndex]; redraw(one.id); } },
          ...options.map((o) => el("option", {}, o === "all" ? "all groups" : o)));
        choice.selectedIndex = options.indexOf(Sap.pickedIn(one, left));
        box.append(el("label", {}, el("span", { class: "unpaper" }, one.chart.picking || "of"), choice), el("span", { class: "paper" }, String(options[choice.selectedIndex])));
      } else if (options.length && one.chart.pick === 0) box.append(el("span", { class: "name" }, String(options[0])));
    }
    if (!box.children.length && one.chart) box.classList.add("bare");
    box.append(el("button", { type: "button", class: "push", id: "csv-" + one.id, onclick: () => Sap.download(one), "aria-label": "Download as CSV: " + one.title }, "CSV"));
    return box;
  }

  function about(page) {
    const box = el("section", { id: "recipe", "aria-labelledby": "recipe-title" },
      el("h2", { class: "head", id: "recipe-title" }, "Recipe and environment", el("a", { href: "#recipe", "aria-label": "Link to: Recipe and environment" }, "#")));
    for (const run of page.runs) {
      const rows = Object.entries(run.environment).map(([k, v]) => el("tr", {}, el("th", { scope: "row" }, k), el("td", { class: "t" }, v)));
      const parts = [el("h3", {}, run.label + (run.state === "finished" ? "" : ` (${run.state})`))];
      if (run.about) parts.push(el("p", {}, run.about));
      parts.push(run.recipe ? el("pre", { tabindex: 0, role: "region", "aria-label": "Recipe of " + run.label }, run.recipe) : el("p", { class: "missing" }, "No recipe: this was made by one command."));
      parts.push(rows.length ? el("div", { class: "panel" }, el("table", {}, el("caption", {}, "Where it ran"), el("tbody", {}, ...rows))) : el("p", { class: "missing" }, "The environment is noted at the end of a run."));
      box.append(el("div", { class: "about" }, ...parts));
    }
    return box;
  }

  const SHORT = { compare: "Figures", accuracy: "Accuracy", pareto: "Trade-off", channels: "Channels", zeros: "Zeros", scores: "Scores", staircase: "Staircase", forms: "Forms", layers: "Layers", sensitivity: "Sensitivity", recipe: "Recipe" };
  function navigation(page) {
    const ids = [...shown(page).map((s) => s.id), "recipe"];
    document.getElementById("nav").replaceChildren(el("ul", {}, ...ids.map((id) => el("li", {}, el("a", { href: "#" + id }, SHORT[id] || id)))));
    mark();
  }

  function mark() {
    const all = [...document.querySelectorAll("main > section")];
    const now = all.filter((s) => s.getBoundingClientRect().top < 120).pop();
    for (const link of document.querySelectorAll("#nav a")) {
      if (now && link.hash === "#" + now.id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }

  function draw(one) {
    const place = document.getElementById("chart-" + one.id);
    const old = Sap.charts.get(one.id);
    if (old) { old.dispose(); Sap.charts.delete(one.id); }
    if (!place) return;
    const { option, height, click } = Sap.draw[one.chart.kind](one, Sap.drawnOf(one));
    place.style.height = height + "px";
    const chart = echarts.init(place, null, { renderer: "svg", width: state.paper || undefined });
    chart.setOption(option);
    if (click) chart.on("click", click);
    Sap.charts.set(one.id, chart);
  }

  function redraw(id) {
    const one = state.page.sections.find((s) => s.id === id), old = document.getElementById(id);
    const focused = document.activeElement && document.activeElement.id;
    old.replaceWith(section(one, state.page));
    draw(one);
    if (focused && document.getElementById(focused)) document.getElementById(focused).focus({ preventScroll: true });
  }

  function render() {
    const page = state.page, focused = document.activeElement && document.activeElement.id;
    header(page);
    navigation(page);
    document.getElementById("main").replaceChildren(...shown(page).map((s) => section(s, page)), about(page));
    document.getElementById("foot").replaceChildren(el("p", {}, `Made by Sapwood ${page.sapwood} on ${page.made.slice(0, 16).replace("T", " at ")}. Charts by Apache ECharts ${echarts.version} (Apache-2.0). Everything is in this file; nothing is loaded from anywhere.`));
    page.sections.forEach(draw);
    if (focused && document.getElementById(focused)) document.getElementById(focused).focus({ preventScroll: true });
  }

  Sap.choose = function (id) {
    state.chosen = id;
    state.still = true;
    render();
    Sap.say("Shown: " + Sap.chosenCard().title);
  };

  function setTheme(name) { document.documentElement.dataset.theme = name; }
  function toggleTheme() {
    setTheme(Sap.isDark() ? "light" : "dark");
    try { localStorage.setItem("sapwood-theme", document.documentElement.dataset.theme); } catch (error) { /* from disk it may not be kept */ }
    render();
    document.querySelector(".bar button").focus();
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  function kept() { try { return localStorage.getItem("sapwood-theme"); } catch (error) { return null; } }
  dark.addEventListener("change", () => { if (!kept()) { setTheme(dark.matches ? "dark" : "light"); render(); } });

  let before = null;
  function forPrint(printing) {
    if (printing) { before = document.documentElement.dataset.theme; setTheme("light"); }
    else setTheme(before || "light");
    state.paper = printing ? 640 : null; // a sheet is narrower than most windows
    state.still = true;
    state.page.sections.forEach(draw);
  }
  addEventListener("beforeprint", () => forPrint(true));
  addEventListener("afterprint", () => forPrint(false));

  let width = innerWidth, waiting = null;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => { state.still = true; state.page.sections.forEach(draw); }, 120);
  });
  addEventListener("scroll", mark, { passive: true });

  async function follow() {
    let version = state.page.live.version, trouble = "";
    for (;;) {
      await new Promise((done) => setTimeout(done, 1000));
      try {
        const answer = await fetch("data.json", { cache: "no-store" });
        if (!answer.ok) throw new Error("the run cannot be read");
        const page = await answer.json();
        if (page.live.version === version && !trouble) continue;
        version = page.live.version;
        trouble = "";
        state.page = page;
        state.still = true;
        render();
      } catch (error) {
        const mark = document.querySelector(".live");
        trouble = error instanceof TypeError ? "sapwood report --serve was stopped" : error.message; // a TypeError: nobody answered
        if (mark) { mark.classList.remove("on"); mark.lastChild.textContent = trouble; }
      }
    }
  }

  state.page = JSON.parse(document.getElementById("data").textContent);
  state.chosen = state.page.chosen;
  setTheme(kept() || (dark.matches ? "dark" : "light"));
  render();
  if (location.hash) { const there = document.getElementById(decodeURIComponent(location.hash.slice(1))); if (there) there.scrollIntoView(); }
  if (state.page.live) follow();
})();
