// Several runs side by side: the differences of their settings first, then key figures and curves.

// If several runs have the same name, a number is added to each of these names.
function namedApart(reports) {
  const counts = new Map();
  for (const { name } of reports) counts.set(name, (counts.get(name) ?? 0) + 1);
  return reports.map((report, i) =>
    counts.get(report.name) > 1 ? { ...report, name: `${report.name} (${i + 1})` } : report,
  );
}

function differingSettings(reports) {
  const names = [...new Set(reports.flatMap((report) => report.settings.map((setting) => setting.name)))];
  const values = reports.map(
    (report) => new Map(report.settings.map((setting) => [setting.name, setting.value])),
  );
  return names
    .map((name) => ({ name, values: values.map((each) => each.get(name) ?? MISSING) }))
    .filter((row) => new Set(row.values).size > 1);
}

function keyFigures(reports) {
  const rows = [
    ["state", (report) => report.state],
    ["duration", (report) => duration(report.duration_s)],
    ["samples/s", (report) => short(meanSpeed(report.workers, "samples", report))],
    ["updates/s", (report) => short(meanSpeed(report.models, "updates", report))],
    ["share of computing", (report) => shareOf(report, "computing")],
    ["share of waiting", (report) => shareOf(report, "waiting")],
    ["share of transfer", (report) => shareOf(report, "transfer")],
    ["mean staleness, updates", (report) => short(meanStaleness(report))],
  ];
  const metrics = [...new Set(reports.flatMap((report) => report.metrics.map((metric) => metric.name)))];
  for (const name of metrics) rows.push([`last ${name}`, (report) => lastValue(report, name)]);
  return rows
    .map(([name, value]) => ({ name, values: reports.map(value) }))
    .filter((row) => row.values.some((value) => value !== MISSING));
}

// The number of samples or updates per second, from the numbers of the workers or models. Updates of the time before a
// run was resumed do not count.
function meanSpeed(parts, unit, { duration_s }) {
  const total = parts.reduce((sum, part) => sum + part[unit], 0);
  return duration_s > 0 && total > 0 ? total / duration_s : null;
}

function shareOf(report, kind) {
  const total = totalTime(report.workers);
  const spent = sumOf(total);
  return spent ? percent((total[kind] ?? 0) / spent) : MISSING;
}

function meanStaleness(report) {
  const all = report.models.flatMap((model) => model.staleness);
  const pushes = all.reduce((sum, [, count]) => sum + count, 0);
  return pushes ? all.reduce((sum, [value, count]) => sum + value * count, 0) / pushes : null;
}

function lastValue(report, name) {
  const point = report.metrics.find((metric) => metric.name === name)?.points.at(-1);
  if (!point) return MISSING;
  return known(point.value) ? short(point.value) : "NaN or infinite";
}

function runsTable(title, first, reports, number = false) {
  return table(title, [
    { title: first, text: (row) => row.name, sortable: false },
    ...reports.map((report, i) => ({
      title: report.name,
      text: (row) => row.values[i],
      sortable: false,
      number,
    })),
  ]);
}

function comparePanel(reports, ...tools) {
  const title = make("h1", {}, `${reports.length} runs side by side`);
  const header = make(
    "header",
    {},
    make("div", { class: "titles" }, title, make("div", { class: "corner" }, tools)),
  );
  const settings = runsTable("Settings that differ", "setting", reports);
  settings.show(differingSettings(reports));
  const same = make(
    "p",
    { class: "note", hidden: !settings.root.hidden },
    "The runs have the same settings.",
  );
  const figures = runsTable("Key figures", "figure", reports, true);
  figures.show(keyFigures(reports));
  const times = section(
    "Time of the workers",
    legend(totalTime(reports.flatMap((report) => report.workers)), false),
    make(
      "div",
      { class: "runs" },
      reports.flatMap((report) => [
        make("span", { class: "label" }, report.name),
        stackedBar(totalTime(report.workers)),
      ]),
    ),
  );
  const curves = metricsPanel("Loss and metrics of all runs");
  curves.show(...reports);
  return make(
    "div",
    { class: "compare" },
    header,
    section("Settings that differ", same, settings.root),
    section("Key figures", figures.root),
    times,
    curves.root,
  );
}
