"use strict";
/* Charts of the model itself: channels, zeros, scores, layers, forms, sensitivity. */
Sap.MOST_BARS = 26;

/* Horizontal bars, one line for each name in the order of the model; long lists have a slider, so that a wheel or a
   finger over the chart still moves the page. */
Sap.bars = function (names, series, extra) {
  const many = names.length > Sap.MOST_BARS, shown = Math.min(names.length, Sap.MOST_BARS);
  const room = Sap.isNarrow() ? 96 : 220;
  const last = Math.max(0, Math.ceil((100 * Sap.MOST_BARS) / names.length));
  return {
    option: {
      ...Sap.base(), series,
      grid: { left: 8, right: many ? 40 : 22, top: 40, bottom: extra.name ? 34 : 12, containLabel: true },
      xAxis: Sap.axis(Sap.someOf(extra.name || "", names), { type: "value", ...extra.axis }),
      yAxis: Sap.axis("", { type: "category", data: names, inverse: true, splitLine: { show: false }, axisLabel: { width: room, overflow: "truncate", interval: 0, hideOverlap: false } }),
      dataZoom: many ? [{ type: "slider", yAxisIndex: 0, start: 0, end: last, right: 6, width: 16, brushSelect: false, showDetail: false, showDataShadow: false, borderColor: Sap.colour("line"), fillerColor: "rgb(128 128 128 / 20%)" }] : undefined,
      tooltip: { ...Sap.base().tooltip, trigger: "axis", axisPointer: { type: "shadow", shadowStyle: { color: "rgb(128 128 128 / 10%)" } }, formatter: (p) => extra.tip(p[0].dataIndex) },
    },
    height: 86 + Math.max(3, shown) * (series.length > 2 || !extra.pairs ? 24 : 30),
  };
};

/* On paper nothing slides: it says how much is shown. */
Sap.someOf = (name, names) => (Sap.state.paper && names.length > Sap.MOST_BARS ? `${name}; the first ${Sap.MOST_BARS} of ${names.length} groups` : name);

Sap.stripes = () => ({ symbol: "rect", dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: -Math.PI / 4, color: Sap.isDark() ? "rgb(0 0 0 / 35%)" : "rgb(255 255 255 / 60%)" });

Sap.draw.channels = function (section, rows) {
  const bar = (name, colour, value, decal) => ({ name, type: "bar", stack: "all", color: colour, barMaxWidth: 18, itemStyle: decal ? { decal } : {}, data: rows.map(value) });
  return Sap.bars(rows.map((r) => r[1]), [
    bar("kept", Sap.colour("pruned"), (r) => (r[5] === "yes" ? 0 : r[3])),
    bar("removed", Sap.colour("removed"), (r) => r[4], Sap.stripes()),
    bar("frozen", Sap.colour("dense"), (r) => (r[5] === "yes" ? r[2] : 0)),
  ], { name: "channels", tip: (i) => Sap.tip(rows[i][1], [["channels", rows[i][2]], ["kept", rows[i][3]], ["removed", rows[i][4]], ["frozen", rows[i][5]], ["why", rows[i][6]]]) });
};

Sap.draw.zeros = function (section, rows) {
  const share = (r, part) => (r[2] ? (100 * part) / r[2] : 0);
  return Sap.bars(rows.map((r) => r[1]), [
    { name: "stay", type: "bar", stack: "all", color: Sap.colour("pruned"), barMaxWidth: 18, data: rows.map((r) => share(r, r[3])) },
    { name: "zero", type: "bar", stack: "all", color: Sap.colour("removed"), barMaxWidth: 18, itemStyle: { decal: Sap.stripes() }, data: rows.map((r) => share(r, r[4])) },
  ], { name: "share of the weights", axis: { max: 100, axisLabel: { formatter: "{value}%" } }, tip: (i) => Sap.tip(rows[i][1], [["weights", Sap.text(rows[i][2], "count")], ["stay", Sap.text(rows[i][3], "count")], ["zero", `${Sap.text(rows[i][4], "count")} (${share(rows[i], rows[i][4]).toFixed(1)}%)`], ["pattern", rows[i][5]]]) });
};

Sap.draw.scores = function (section, rows) {
  const title = rows[0][0], group = rows[0][1];
  const cut = (section.chart.cuts[title] || {})[group];
  const side = (name, index, colour, decal) => ({
    name, type: "bar", stack: "all", color: colour, barWidth: "92%", itemStyle: decal ? { decal } : {},
    data: rows.map((r) => ({ value: [(r[2] + r[3]) / 2, r[index]], row: r })),
  });
  const kept = side("kept", 4, Sap.colour("pruned"));
  if (cut !== null && cut !== undefined) kept.markLine = { silent: true, symbol: "none", lineStyle: { color: Sap.colour("ink"), width: 2, type: "solid" }, label: { formatter: `cut at ${Sap.significant(cut, 3)}`, color: Sap.colour("ink"), fontWeight: 600 }, data: [{ xAxis: cut }] };
  const unit = section.chart.what[title] || "score";
  const values = rows.flatMap((r) => [r[2], r[3]]);
  return {
    option: {
      ...Sap.base(), series: [side("removed", 5, Sap.colour("removed"), Sap.stripes()), kept],
      grid: { left: 14, right: 22, top: 56, bottom: 36, containLabel: true },
      xAxis: Sap.axis(Sap.isNarrow() ? "score" : unit, { type: "value", min: Math.min(...values), max: Math.max(...values), axisLabel: { formatter: Sap.tick, showMinLabel: false, showMaxLabel: false }, splitLine: { show: false } }),
      yAxis: Sap.axis("", { type: "value", minInterval: 1 }),
      tooltip: { ...Sap.base().tooltip, trigger: "item", formatter: (p) => Sap.tip(group, [["score", `${Sap.significant(p.data.row[2], 3)} to ${Sap.significant(p.data.row[3], 3)}`], ["kept", Sap.text(p.data.row[4], "count")], ["removed", Sap.text(p.data.row[5], "count")]]) },
    },
    height: 360,
  };
};

Sap.draw.layers = function (section, rows) {
  const most = Sap.isNarrow() ? 12 : 20;
  const weight = (r) => Math.max(r[3] || 0, r[4] || 0);
  const least = rows.map(weight).sort((a, b) => b - a)[Math.min(most, rows.length) - 1];
  const shown = rows.filter((r) => weight(r) >= least).slice(0, most);
  const bar = (name, colour, index) => ({ name, type: "bar", color: colour, barMaxWidth: 10, barGap: "15%", data: shown.map((r) => r[index]) });
  const made = Sap.bars(shown.map((r) => r[1]), [bar("dense", Sap.colour("dense"), 3), bar("pruned", Sap.colour("pruned"), 4)],
    { pairs: true, name: rows.length > shown.length ? `ms; the ${shown.length} longest of ${rows.length} layers` : "ms", tip: (i) => Sap.tip(shown[i][1], [["kind", shown[i][2]], ["dense", Sap.text(shown[i][3], "ms")], ["pruned", Sap.text(shown[i][4], "ms")]]) });
  return made;
};

Sap.draw.forms = function (section, rows) {
  const points = Sap.unique(rows.map((r) => r[1])), forms = Sap.unique(rows.map((r) => r[2]));
  const shapes = ["circle", "rect", "diamond", "triangle", "roundRect", "pin"];
  const series = points.map((point, index) => ({
    name: point, type: "scatter", symbol: shapes[index % shapes.length], symbolSize: 14, itemStyle: { opacity: 0.9 },
    data: rows.filter((r) => r[1] === point).map((r) => ({ value: [r[4], r[2]], row: r })),
    markLine: index ? undefined : { silent: true, symbol: "none", lineStyle: { color: Sap.colour("dense"), width: 2, type: "dashed" }, label: { formatter: "as fast as dense", position: "start", color: Sap.colour("muted") }, data: [{ xAxis: 1 }] },
  }));
  const speeds = rows.map((r) => r[4]), low = Math.min(...speeds, 0.8), high = Math.max(...speeds, 1.25), log = high / low > 15;
  return {
    option: {
      ...Sap.base(), series, grid: { left: 8, right: 40, top: 58, bottom: 34, containLabel: true },
      xAxis: Sap.axis("speed against dense", { type: log ? "log" : "value", min: log ? low * 0.8 : 0, max: log ? high * 1.3 : undefined, axisLabel: { formatter: (v) => Sap.tick(v) + " x", showMinLabel: !log, showMaxLabel: !log } }),
      yAxis: Sap.axis("", { type: "category", data: forms, inverse: true, splitLine: { show: true, lineStyle: { color: Sap.colour("line") } }, axisLabel: { width: Sap.isNarrow() ? 96 : 220, overflow: "truncate", interval: 0, hideOverlap: false } }),
      tooltip: { ...Sap.base().tooltip, trigger: "item", formatter: (p) => Sap.tip(p.data.row[2], [["at", p.data.row[1]], ["latency", Sap.text(p.data.row[3], "ms")], ["speed", `${Sap.text(p.data.row[4], "ratio")} (${Sap.text(p.data.row[5], "ratio")} to ${Sap.text(p.data.row[6], "ratio")})`], ["verdict", p.data.row[7]]]) },
    },
    height: 130 + 44 * forms.length,
  };
};

Sap.LEAST_RANGE = 20; // points of accuracy between light and dark

Sap.draw.sensitivity = function (section, rows) {
  const shares = Sap.unique(rows.map((r) => r[3])), groups = Sap.unique(rows.map((r) => r[1]));
  const known = rows.filter((r) => r[5] !== null), values = known.map((r) => 100 * r[5]);
  const dense = 100 * section.chart.dense[rows[0][0]], high = Math.max(...values, dense);
  const low = Math.min(...values, Math.max(0, high - Sap.LEAST_RANGE)); // so that a dark cell is always a loss that counts
  const light = (value) => value > low + 0.55 * (high - low);
  const labels = rows.length <= 150 && !(Sap.isNarrow() && shares.length > 6);
  const data = known.map((r) => ({ value: [shares.indexOf(r[3]), groups.indexOf(r[1]), 100 * r[5]], row: r, label: { color: light(100 * r[5]) ? "#16211a" : "#ffffff" } }));
  const made = Sap.bars(groups, [{
    type: "heatmap", data, itemStyle: { borderColor: Sap.colour("card"), borderWidth: 2, borderRadius: 3 },
    label: { show: labels, formatter: (p) => p.value[2].toFixed(0), fontSize: 12 },
    emphasis: { itemStyle: { borderColor: Sap.colour("ink") } },
  }], { name: "removed of the group", tip: () => "" });
  const narrow = Sap.isNarrow();
  const above = narrow || groups.length > Sap.MOST_BARS;
  made.option.grid = { left: 8, right: groups.length > Sap.MOST_BARS ? 40 : narrow ? 14 : 96, top: above ? 58 : 14, bottom: 34, containLabel: true };
  made.option.xAxis = Sap.axis(Sap.someOf("removed of the group", groups), { type: "category", data: shares.map((s) => `${(100 * s).toFixed(0)}%`), splitLine: { show: false } });
  made.option.legend = { show: false };
  made.option.visualMap = { min: low, max: high > low ? high : low + 1, calculable: false, orient: above ? "horizontal" : "vertical", right: above ? "center" : 0, top: above ? 0 : "middle", itemHeight: 110, itemWidth: 14, text: [`${high.toFixed(0)}%`, `${low.toFixed(0)}%`], textStyle: { color: Sap.colour("ink") }, inRange: { color: ["#4a1942", "#9c3848", "#d9825b", "#eccb8f", "#e6f0d0"] }, formatter: (v) => `${v.toFixed(0)}%` };
  made.option.tooltip = { ...Sap.base().tooltip, trigger: "item", formatter: (p) => Sap.tip(p.data.row[1], [["removed", `${Sap.text(p.data.row[4], "percent")} of ${p.data.row[2]}`], ["accuracy", Sap.text(p.data.row[5], "percent")], ["the whole model", dense.toFixed(1) + "%"], ["cut along", p.data.row[6]]]) };
  made.height = 90 + (Sap.state.paper ? 26 : 30) * Math.min(groups.length, Sap.MOST_BARS) + (above ? 40 : 0);
  return made;
};
