"use strict";
/* Charts of accuracy and time, drawn by Apache ECharts from the rows of a section. */
Sap.draw = {};

/* What all charts share. To the right of a legend there is room for its arrows and, on a wide page, for the button. */
Sap.base = function () {
  const ink = Sap.colour("ink"), muted = Sap.colour("muted"), line = Sap.colour("line");
  return {
    animation: !matchMedia("(prefers-reduced-motion: reduce)").matches && !Sap.state.still,
    animationDuration: 400,
    textStyle: { fontFamily: "inherit", color: ink },
    color: Sap.palette(),
    grid: { left: 12, right: 18, top: 46, bottom: 12, containLabel: true },
    legend: { top: 0, left: 0, width: "78%", type: "scroll", itemGap: 18, textStyle: { color: ink, fontSize: 13 }, inactiveColor: muted, pageTextStyle: { color: ink }, pageIconColor: ink },
    tooltip: { confine: true, backgroundColor: Sap.colour("card"), borderColor: line, textStyle: { color: ink, fontSize: 13 }, extraCssText: "box-shadow:0 4px 18px rgb(0 0 0/18%)" },
  };
};

Sap.axis = function (name, extra) {
  const muted = Sap.colour("muted"), line = Sap.colour("line");
  return {
    name, nameLocation: "middle", nameGap: 34, nameTextStyle: { color: muted, fontSize: 13 },
    axisLabel: { color: muted, fontSize: 12, hideOverlap: true, ...(extra || {}).axisLabel },
    axisLine: { lineStyle: { color: line } }, axisTick: { show: false },
    splitLine: { lineStyle: { color: line } },
    ...Object.fromEntries(Object.entries(extra || {}).filter(([key]) => key !== "axisLabel")),
  };
};

/* What a pointer over a mark shows: built as elements, so that names stay texts. */
Sap.tip = function (title, pairs) {
  return Sap.el("div", { class: "tip" }, Sap.el("b", {}, String(title)),
    ...pairs.filter(([, v]) => v !== "" && v !== null && v !== undefined).map(([k, v]) => Sap.el("span", {}, Sap.el("span", {}, k), Sap.el("span", {}, String(v)))));
};

Sap.percentAxis = (name, extra) => Sap.axis(name, { type: "value", axisLabel: { formatter: "{value}%" }, ...extra });

/* One colour for each model; the one shown first is green. */
Sap.colourOf = function (title) {
  const { cards, chosen } = Sap.state.page;
  const order = [...cards.filter((c) => c.id === chosen), ...cards.filter((c) => c.id !== chosen)];
  const index = order.findIndex((c) => c.title === title), colours = Sap.palette();
  return index < 0 ? Sap.colour("dense") : colours[index % colours.length];
};

/* Means over the seeds, in the order of time; of two points at the same time the one that comes first in the table. */
Sap.journeyOf = function (rows, variant) {
  const points = new Map();
  for (const [title, , stage, epochs, accuracy] of rows) {
    if (title !== variant) continue;
    const key = stage + "|" + epochs.toFixed(4);
    if (!points.has(key)) points.set(key, { stage, epochs, all: [] });
    points.get(key).all.push(accuracy);
  }
  const found = [...points.values()].map((p) => ({ ...p, mean: Sap.mean(p.all) }));
  return found.sort((a, b) => a.epochs - b.epochs);
};

Sap.draw.journey = function (section, rows) {
  const card = Sap.chosenCard();
  const names = Sap.unique(rows.map((r) => r[0]));
  const all = Object.fromEntries(names.map((n) => [n, Sap.journeyOf(rows, n)]));
  const chosen = card && all[card.title] ? card.title : names[0];
  const lowest = Math.min(...Object.values(all).flat().map((p) => 100 * p.mean));
  const dense = all[chosen].find((p) => p.stage === "dense"), end = Math.max(...Object.values(all).flat().map((p) => p.epochs));
  const areas = dense ? [[{ name: "training", xAxis: 0, itemStyle: { color: "transparent" } }, { xAxis: dense.epochs }],
    [{ name: "recovery", xAxis: dense.epochs }, { xAxis: end }]] : [];
  const rounds = section.chart.rounds[chosen], round = rounds > 1 ? `\nround 1 of ${rounds}` : "";
  const series = names.map((name, index) => {
    const main = name === chosen, points = all[name];
    const pruned = points.find((p) => p.stage === "pruned"), last = points[points.length - 1];
    const marks = [];
    if (main && dense && pruned) marks.push({ coord: [pruned.epochs, 100 * pruned.mean], value: `${(100 * (pruned.mean - dense.mean)).toFixed(1)} points${round}`, label: { position: "left" } });
    if (main && last.stage === "recovery") marks.push({ coord: [last.epochs, 100 * last.mean], value: `${(100 * last.mean).toFixed(1)}%`, label: { position: "top" } });
    return {
      name, type: "line", z: main ? 5 : 2, symbol: "circle", symbolSize: main ? 8 : 5, color: Sap.colourOf(name),
      lineStyle: { width: main ? 3 : 1.5, opacity: main ? 1 : 0.65 },
      data: points.map((p) => ({ value: [p.epochs, 100 * p.mean], stage: p.stage, seeds: p.all.length, spread: [Math.min(...p.all), Math.max(...p.all)] })),
      markPoint: { symbol: "circle", symbolSize: 1, silent: true, data: marks, label: { show: true, color: Sap.colour("ink"), fontWeight: 600, fontSize: 13, lineHeight: 17, distance: 10 } },
      markLine: main && dense ? { silent: true, symbol: "none", lineStyle: { color: Sap.colour("dense"), type: "dashed" }, label: { formatter: "dense", position: "insideStartTop", color: Sap.colour("muted") }, data: [{ yAxis: 100 * dense.mean }] } : undefined,
      markArea: index === 0 && areas.length ? { silent: true, itemStyle: { color: Sap.colour("soft") }, label: { color: Sap.colour("muted"), position: "insideBottom", fontSize: 12 }, data: areas } : undefined,
    };
  });
  return {
    option: {
      ...Sap.base(), series,
      grid: { left: 12, right: 34, top: Sap.isNarrow() && names.length === 1 ? 34 : 60, bottom: 34, containLabel: true },
      legend: { ...Sap.base().legend, show: names.length > 1 },
      xAxis: Sap.axis("epochs", { type: "value", splitLine: { show: false }, max: end }),
      yAxis: Sap.percentAxis("", { min: Math.max(0, Math.floor((lowest - 4) / 20) * 20), max: 100 }),
      tooltip: { ...Sap.base().tooltip, trigger: "item", formatter: (p) => Sap.tip(p.seriesName, [
        ["stage", p.data.stage === "pruned" ? "right after pruning" : p.data.stage], ["epochs", Sap.text(p.value[0], "number")],
        ["accuracy", p.value[1].toFixed(1) + "%"],
        ["over seeds", p.data.seeds > 1 ? p.data.spread.map((v) => (100 * v).toFixed(1)).join(" to ") + "%" : ""]]) },
    },
    height: 400,
  };
};

Sap.draw.pareto = function (section, rows) {
  const cards = Sap.state.page.cards, chosen = Sap.chosenCard(), colourOf = Sap.colourOf;
  const isMain = (r) => chosen && r[0] === chosen.title;
  const point = (r) => ({ value: [r[3], 100 * r[2]], row: r });
  const tooltip = (p) => (p.data.row ? Sap.tip(p.data.row[0], [["seed", p.data.row[1]], ["accuracy", Sap.text(p.data.row[2], "percent")],
    ["latency", Sap.text(p.data.row[3], "ms")], ["speed", Sap.text(p.data.row[4], "ratio")], ["parameters", Sap.text(p.data.row[5], "count")],
    ["on the front", p.data.row[1] === "mean" ? p.data.row[7] : ""], ["measured on", p.data.row[6]]]) : "");
  const names = Sap.unique(rows.map((r) => r[0])).filter((n) => rows.some((r) => r[0] === n && r[1] === "mean"));
  const means = names.map((name) => {
    const row = rows.find((r) => r[0] === name && r[1] === "mean");
    return {
      name, type: "scatter", symbolSize: isMain(row) ? 22 : 15, z: 6, color: colourOf(name),
      itemStyle: { borderColor: isMain(row) ? Sap.colour("ink") : Sap.colour("card"), borderWidth: 2 },
      label: { show: names.length <= 6 && !Sap.isNarrow(), formatter: "{a}", position: "top", color: Sap.colour("ink"), fontSize: 12, width: 160, overflow: "truncate" },
      labelLayout: { hideOverlap: true, moveOverlap: "shiftY" },
      data: [point(row)],
    };
  });
  const seeds = names.map((name) => ({
    name, type: "scatter", symbolSize: 8, z: 4, color: colourOf(name), itemStyle: { opacity: 0.5 },
    data: rows.filter((r) => r[0] === name && r[1] !== "mean").map(point),
  }));
  const fronts = Sap.unique(rows.map((r) => r[6])).map((on) => ({
    name: "front", type: "line", step: "end", silent: true, symbol: "none", z: 3, lineStyle: { color: Sap.colour("pruned"), type: "dashed", width: 2 },
    data: rows.filter((r) => r[7] === "yes" && r[6] === on).sort((a, b) => a[3] - b[3]).map((r) => [r[3], 100 * r[2]]),
  }));
  const heights = rows.map((r) => 100 * r[2]), spread = Math.max(1, Math.max(...heights) - Math.min(...heights));
  return {
    option: {
      ...Sap.base(), series: [...means, ...seeds, ...fronts],
      grid: { left: 30, right: 24, top: 46, bottom: 34, containLabel: true },
      legend: { ...Sap.base().legend, data: names },
      xAxis: Sap.axis("latency, ms", { type: "value", min: 0 }),
      yAxis: Sap.percentAxis("accuracy", { nameGap: 48, scale: true, min: Math.max(0, Math.floor(Math.min(...heights) - 0.15 * spread)), max: Math.min(100, Math.ceil(Math.max(...heights) + 0.15 * spread)) }),
      tooltip: { ...Sap.base().tooltip, trigger: "item", formatter: tooltip },
    },
    height: 430,
    click: (p) => {
      const card = p.data && p.data.row && cards.find((c) => c.title === p.data.row[0]);
      if (card) Sap.choose(card.id);
    },
  };
};

Sap.draw.staircase = function (section, rows) {
  const names = Sap.unique(rows.map((r) => r[0])), bad = Sap.colour("bad"), card = Sap.chosenCard();
  const lines = names.map((name) => ({
    name, type: "line", symbol: "circle", symbolSize: 9, step: false, lineStyle: { width: 2.5 },
    data: rows.filter((r) => r[0] === name).map((r) => ({ value: [100 * r[1], 100 * r[4]], row: r, itemStyle: r[5] ? { color: bad } : undefined, symbol: r[5] ? "triangle" : "circle", symbolSize: r[5] ? 14 : 9 })),
    markLine: { silent: true, symbol: "none", lineStyle: { color: Sap.colour("dense"), type: "dashed" }, label: { formatter: "dense", position: "insideStartTop", color: Sap.colour("muted") }, data: [{ yAxis: 100 }] },
  }));
  const chosen = section.chart.chosen;
  lines.push({
    name: "chosen by the runs", type: "scatter", symbol: "diamond", symbolSize: 18, z: 6, color: Sap.colour("ink"),
    data: chosen.map((c) => ({ value: [100 * c.channels, 100 * c.of_dense], chosen: c, itemStyle: card && c.variant === card.title ? { color: Sap.colour("pruned"), borderColor: Sap.colour("ink"), borderWidth: 1.5 } : { opacity: 0.6 } })),
  });
  const tip = (p) => p.data.chosen
    ? Sap.tip(p.data.chosen.variant, [["channels left", p.value[0].toFixed(0) + "%"], ["of the dense time", p.value[1].toFixed(0) + "%"]])
    : Sap.tip(p.data.row[0], [["channels left", p.value[0].toFixed(0) + "%"], ["FLOPs left", Sap.text(p.data.row[2], "percent")], ["latency", Sap.text(p.data.row[3], "ms")], ["of dense", p.value[1].toFixed(0) + "%"], ["cliff", p.data.row[5]]]);
  return {
    option: {
      ...Sap.base(), series: lines, grid: { left: 30, right: 24, top: 46, bottom: 34, containLabel: true },
      xAxis: Sap.percentAxis("channels left", { min: 0, max: 100 }), yAxis: Sap.percentAxis("of the dense latency", { min: 0, nameGap: 48 }),
      tooltip: { ...Sap.base().tooltip, trigger: "item", formatter: tip },
    },
    height: 380,
  };
};
