// Loss and metrics over the progress of the run, as small multiples; the speed beside them.

const SMOOTHING = [["0", "off"], ["0.6", "light"], ["0.9", "strong"]];
const SPEED = Symbol("speed"); // the key of the chart of the speed

// `reports` have one curve each in every chart. One report takes the colors in turn for its charts.
function metricsPanel(title, axes = AXES) {
  const view = { axis: axes[0][0], log: false, keep: 0 };
  const charts = new Map(); // name of the metric, or SPEED -> chart
  let shown = [];
  const axis = choice("Over", axes, view.axis, (value) => { view.axis = value; draw(); });
  const tools = make(
    "div",
    { class: "tools" },
    axis.root,
    checkbox("logarithmic", (on) => { view.log = on; draw(); }),
    choice("Smoothing", SMOOTHING, "0", (value) => { view.keep = Number(value); draw(); }).root,
  );
  const grid = make("div", { class: "charts" });
  const runs = make("ul", { class: "legend" });
  const nothing = make("p", { class: "note" }, "The script has logged no loss and no metrics. paceline.log(loss=loss) logs one.");
  const root = section(title, tools, runs, nothing, grid);

  function draw() {
    const names = [...new Set(shown.flatMap((report) => report.metrics.map((metric) => metric.name)))];
    const wanted = [...names, ...(shown.some((report) => report.progress.length > 2) ? [SPEED] : [])];
    for (const key of wanted) if (!charts.has(key)) charts.set(key, chart(key === SPEED ? "speed" : key));
    const placed = wanted.map((key) => charts.get(key).root);
    if (placed.length !== grid.children.length || placed.some((each, i) => each !== grid.children[i])) fill(grid, placed);
    nothing.hidden = names.length > 0;
    tools.hidden = !wanted.length;
    names.forEach((name) => charts.get(name).show(metricContent(shown, name, view)));
    if (charts.has(SPEED)) charts.get(SPEED).show(speedContent(shown, view, charts.get(SPEED).heading));
  }

  return {
    root,
    show: (...reports) => {
      shown = reports;
      axis.limit(possibleAxes(reports));
      fill(runs, reports.length > 1 && reports.map((report, i) => make("li", {}, swatch(readable(curveColor(i))), report.name)));
      runs.hidden = reports.length < 2;
      root.hidden = !reports.some((report) => report.metrics.length || report.workers.length || report.progress.length);
      draw();
    },
  };
}

let curveColors = []; // from the data of the page
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
const curveColor = (i) => curveColors[i % curveColors.length];
const curveDash = (i) => DASHES[Math.floor(i / curveColors.length) % DASHES.length];

function metricContent(reports, name, { axis, log, keep }) {
  const curves = [];
  const notes = [];
  reports.forEach((report, i) => {
    const metric = report.metrics.find((each) => each.name === name);
    if (!metric) return;
    const points = metricPoints(metric, axis);
    const curve = { name: reports.length > 1 ? report.name : name, color: curveColor(i), dash: curveDash(i) };
    const dots = metric.kind === "point";
    if (metric.guessed) notes.push("A guess: the values of the tensor on which the script called backward().");
    if (!keep || dots) return curves.push({ ...curve, points, dots });
    return curves.push({ ...curve, points, faint: true }, { ...curve, name: `${curve.name}, smoothed`, points: smoothed(points, keep) });
  });
  return { curves, axis, log, words: notes[0] ?? "" };
}

function speedContent(reports, { axis, log }, heading) {
  const found = reports.map((report) => speedOf(report.progress, axis));
  fill(heading, found[0][0]);
  const curves = found.map(([unit, points], i) => ({
    name: reports.length > 1 ? reports[i].name : unit,
    color: curveColor(i),
    dash: curveDash(i),
    points,
  }));
  return { curves, axis, log, from0: !log, words: "Of all workers together." };
}
