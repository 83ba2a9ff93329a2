// Draws the page from its data.

const PANELS = [
  causesPanel,
  livePanel,
  workersPanel,
  () => metricsPanel("Loss and metrics"),
  timelinePanel,
  modelsPanel,
  trafficPanel,
  ledgerPanel,
  marksPanel,
  notesPanel,
  settingsPanel,
];

// Everything about one run.
function runPanel(...tools) {
  const panels = [headerPanel(...tools), ...PANELS.map((panel) => panel())];
  return {
    root: make(
      "article",
      {},
      panels.map((panel) => panel.root),
    ),
    show: (report) => panels.forEach((panel) => panel.show(report)),
  };
}

async function main() {
  const data = await dataOf(document.getElementById("data"));
  kinds = data.kinds;
  curveColors = data.curves;
  for (const { name, color } of kinds) document.documentElement.style.setProperty(`--time-${name}`, color);
  applyTheme();
  const reports = namedApart(data.reports);
  const body = make("main");
  document.body.append(body);
  if (reports.length === 1) {
    const panel = runPanel(themeButton());
    panel.show(reports[0]);
    const show = (report) => {
      document.title = `${report.name}: ${report.state}`;
      panel.show(report);
    };
    body.append(data.live ? follow(data.live, reports[0], show) : "", panel.root);
  } else {
    const place = make("div");
    const panels = new Map();
    const open = (index) => {
      if (!panels.has(index)) {
        panels.set(index, runPanel());
        panels.get(index).show(reports[index]);
      }
      fill(place, panels.get(index).root);
    };
    const runs = choice(
      "Show in full",
      reports.map((report, i) => [String(i), report.name]),
      "0",
      (value) => open(Number(value)),
    );
    open(0);
    body.append(comparePanel(reports, themeButton()), make("div", { class: "choose" }, runs.root), place);
  }
  requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("paceline-drawn")));
}

main().catch((error) => {
  document.body.append(make("p", { class: "failure" }, `This report cannot be shown: ${error.message}`));
  throw error;
});
