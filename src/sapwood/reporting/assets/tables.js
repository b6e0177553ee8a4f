"use strict";
/* Tables beside the charts, and the same as CSV. */
Sap.csvCell = function (value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  let text = String(value);
  if (/^[=+\-@\t\r]/.test(text)) text = "'" + text; // a spreadsheet would take it for a formula
  return /[",\n\r]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
};

Sap.unitNames = { percent: "fraction", ms: "ms", bytes: "bytes", ratio: "times dense" };
Sap.csv = function (section) {
  const names = section.table.columns.map(([name, unit]) => (Sap.unitNames[unit] ? `${name} (${Sap.unitNames[unit]})` : name));
  return [names, ...section.table.rows].map((row) => row.map(Sap.csvCell).join(",")).join("\r\n") + "\r\n";
};

Sap.download = function (section) {
  const link = Sap.el("a", { download: `sapwood-${section.id}.csv` });
  link.href = URL.createObjectURL(new Blob(["\ufeff" + Sap.csv(section)], { type: "text/csv;charset=utf-8" }));
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  Sap.say(`sapwood-${section.id}.csv was saved.`);
};

Sap.MOST_ROWS = 500;
Sap.table = function (section, rows) {
  const el = Sap.el;
  const { columns } = section.table;
  const kind = (unit) => (unit === "text" ? "t" : "n");
  const cell = (value, unit, first) => {
    const attributes = { class: kind(unit), "data-value": typeof value === "number" ? value : null };
    if (first) attributes.scope = "row";
    return el(first ? "th" : "td", attributes, unit === "text" && value !== null ? String(value) : Sap.text(value, unit));
  };
  const body = rows.slice(0, Sap.MOST_ROWS).map((row) => el("tr", {}, ...row.map((v, i) => cell(v, columns[i][1], i === 0))));
  const more = rows.length > Sap.MOST_ROWS ? ` The first ${Sap.MOST_ROWS} of ${rows.length} rows; the CSV has all.` : "";
  const table = el("table", {},
    el("caption", {}, section.title + "." + more),
    el("thead", {}, el("tr", {}, ...columns.map(([name, unit]) => el("th", { class: kind(unit), scope: "col" }, name)))),
    el("tbody", {}, ...body));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${section.title}: table` }, table);
};

/* A table that opens; it is made when it is looked at. */
Sap.foldedTable = function (section, open) {
  const box = Sap.el("details", {}, Sap.el("summary", {}, "The numbers as a table"));
  const fill = () => {
    Sap.state.open[section.id] = box.open;
    if (box.open && box.children.length === 1) box.append(Sap.table(section, section.by_variant ? Sap.rowsOf({ ...section, chart: {} }) : section.table.rows));
  };
  box.addEventListener("toggle", fill);
  if (Sap.state.open[section.id] === undefined ? open : Sap.state.open[section.id]) { box.open = true; fill(); }
  return box;
};

/* Every figure in a line of its own, a column for each variant. */
Sap.sideBySide = function (section) {
  const el = Sap.el, { columns, rows } = section.table;
  const line = ([name, unit], index) => el("tr", {}, el("th", { scope: "row" }, name),
    ...rows.map((r) => el("td", { class: unit === "text" ? "t" : "n", "data-value": typeof r[index] === "number" ? r[index] : null, "data-figure": name },
      unit === "text" && r[index] !== null ? String(r[index]) : Sap.text(r[index], unit))));
  const table = el("table", { class: "sides" }, el("caption", {}, "Means over the seeds; latency and counts of the last seed."),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "figure"), ...rows.map((r) => el("th", { scope: "col", class: "n" }, r[0])))),
    el("tbody", {}, ...columns.slice(1).map((c, i) => line(c, i + 1))));
  return el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": `${section.title}: table` }, table);
};
