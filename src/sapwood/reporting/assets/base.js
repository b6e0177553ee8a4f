"use strict";
/* Elements, numbers and colours. Every text from a model or a recipe goes through textContent. */
const Sap = { state: { chosen: null, picks: {}, open: {}, page: null }, charts: new Map() };

Sap.el = function (tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
};

Sap.significant = function (value, digits) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  const places = Math.max(0, digits - 1 - size);
  return value.toLocaleString("en-US", { minimumFractionDigits: Math.min(places, 6), maximumFractionDigits: Math.min(places, 6) });
};

/* What stands at a tick of an axis: to the last digit, so that no two ticks read the same. */
Sap.tick = (value) => String(Number(value.toPrecision(6)));

/* [number, unit] as people read it; two that are compared have the unit of the larger one, `like`. */
Sap.parts = function (value, unit, like = value) {
  if (value === null || value === undefined) return ["–", ""];
  if (typeof value !== "number") return [String(value), ""];
  if (unit === "percent") return [(100 * value).toFixed(1), "%"];
  if (unit === "ms") {
    if (like >= 1000) return [Sap.significant(value / 1000, 3), "s"];
    return like < 0.1 ? [Sap.significant(value * 1000, 3), "µs"] : [Sap.significant(value, 3), "ms"];
  }
  if (unit === "bytes") {
    for (const [size, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
      if (like >= size) return [Sap.significant(value / size, 3), name];
    return [String(value), "B"];
  }
  if (unit === "ratio") return [value >= 0.095 ? value.toFixed(2) : Sap.significant(value, 2), "x"];
  if (unit === "count") return [Math.round(value).toLocaleString("en-US"), ""];
  return [Number.isInteger(value) ? String(value) : Sap.significant(value, 3), ""];
};

Sap.text = function (value, unit, like = value) {
  const [number, name] = Sap.parts(value, unit, like);
  return name === "" ? number : name === "%" ? number + "%" : number + " " + name;
};

Sap.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
Sap.isDark = () => document.documentElement.dataset.theme === "dark";
Sap.palette = () => Sap.isDark()
  ? ["#4fb873", "#6fa8e8", "#e0a458", "#c08be0", "#4fc3c3", "#e88aa5", "#b7c05a"]
  : ["#2c8a4b", "#2f6fb7", "#b8701a", "#8450a8", "#16808a", "#b8436a", "#6c7a14"];
Sap.isNarrow = () => window.innerWidth < 720;
Sap.say = (text) => { document.getElementById("said").textContent = text; };
Sap.mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;
Sap.unique = (values) => [...new Set(values)];

Sap.chosenCard = () => Sap.state.page.cards.find((c) => c.id === Sap.state.chosen) || Sap.state.page.cards[0] || null;

/* The rows of a section that the chosen model and the picked group leave. */
Sap.rowsOf = function (section) {
  let rows = section.table.rows;
  const card = Sap.chosenCard();
  if (section.by_variant && card) rows = rows.filter((r) => r[0] === card.title);
  const chart = section.chart || {};
  if (chart.pick !== undefined) {
    const picked = Sap.pickedIn(section, rows);
    rows = rows.filter((r) => r[chart.pick] === picked);
  }
  return rows;
};

/* Of these, what a chart can draw: a number that is not one is in the table, and nowhere else. */
Sap.drawnOf = (section) => Sap.rowsOf(section).filter((r) => (section.chart.needs || []).every((i) => r[i] !== null));

Sap.optionsIn = (section, rows) => Sap.unique(rows.map((r) => r[section.chart.pick]));
Sap.pickedIn = function (section, rows) {
  const options = Sap.optionsIn(section, rows);
  const wanted = Sap.state.picks[section.id];
  return options.includes(wanted) ? wanted : options[0];
};
