// Loss and metrics over the progress of the run, as small multiples; the speed beside them.

const SMOOTHING = [
  ["0", "off"],
  ["0.6", "light"],
  ["0.9", "strong"],
];
const SPEED = Symbol("speed"); // the key of the chart of the speed

const MOST_CHARTS = 12; // further charts are shown when the reader opens them

// `show(...reports)`: each report has one curve in every chart. With several reports, times count from when each run
// began to train, so that the curves can be compared.
function metricsPanel(title, axes = AXES) {
  const view = { axis: axes[0][0], log: false, keep: 0, zeros: [], left: 0 };
  const charts = new Map(); // name of the metric, or SPEED -> chart
  let shown = [];
  const axis = choice("Over", axes, view.axis, (value) => {
    view.axis = value;
    draw();
  });
  const tools = make(
    "div",
    { class: "tools" },
    axis.root,
    checkbox("logarithmic", (on) => {
      view.log = on;
      draw();
    }),
    choice("Smoothing", SMOOTHING, "0", (value) => {
      view.keep = Number(value);
      draw();
    }).root,
  );
  const grid = make("div", { class: "charts" });
  let names = [];
  const rest = details("More metrics", () => {
    const others = make("div", { class: "charts" });
    return { root: others, show: () => place(others, names.slice(MOST_CHARTS)) };
  });
  const runs = make("ul", { class: "legend" });
  const zero = make("p", { class: "note" }, "Times count from when each run began to train.");
  const nothing = make("p", { class: "note" }, "The script has logged no metrics, such as the loss.");
  const root = section(title, tools, runs, zero, nothing, grid, rest.root);

  // Show the charts of some metrics, or of the speed, in a grid. Charts that stay keep the focus.
  function place(target, keys) {
    for (const key of keys) if (!charts.has(key)) charts.set(key, chart(key === SPEED ? "speed" : key));
    const roots = keys.map((key) => charts.get(key).root);
    if (roots.length !== target.children.length || roots.some((each, i) => each !== target.children[i]))
      fill(target, roots);
    for (const key of keys) {
      const found = charts.get(key);
      found.show(key === SPEED ? speedContent(shown, view, found.heading) : metricContent(shown, key, view));
    }
  }

  function drawRuns() {
    fill(
      runs,
      shown.map((report, i) => make("li", {}, swatch(readable(curveColor(i))), report.name)),
    );
  }

  theme.changed.add(drawRuns); // the theme changes the colors of the curves

  function draw() {
    names = [...new Set(shown.flatMap((report) => report.metrics.map((metric) => metric.name)))];
    const speed = shown.some((report) => report.progress.length > 2);
    place(grid, [...names.slice(0, MOST_CHARTS), ...(speed ? [SPEED] : [])]);
    fill(rest.root.firstChild, plural(names.length - MOST_CHARTS, "more metric"));
    rest.root.hidden = names.length <= MOST_CHARTS;
    rest.show();
    nothing.hidden = names.length > 0;
    tools.hidden = !names.length && !speed;
  }

  return {
    root,
    show: (...reports) => {
      shown = reports;
      view.zeros = reports.map((report) => (reports.length > 1 ? trainedFrom(report) : 0));
      view.left = reports.length > 1 ? 0 : trainedFrom(reports[0]);
      axis.limit(possibleAxes(reports));
      drawRuns();
      runs.hidden = reports.length < 2;
      zero.hidden = runs.hidden;
      root.hidden = !reports.some(
        (report) => report.metrics.length || report.workers.length || report.progress.length,
      );
      draw();
    },
  };
}

let curveColors = []; // from the data of the page
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
const curveColor = (i) => curveColors[i % curveColors.length];
const curveDash = (i) => DASHES[Math.floor(i / curveColors.length) % DASHES.length];

function metricContent(reports, name, { axis, log, keep, zeros, left }) {
  const curves = [];
  const notes = [];
  reports.forEach((report, i) => {
    const metric = report.metrics.find((each) => each.name === name);
    if (!metric) return;
    const points = metricPoints(metric, axis, zeros[i]);
    const curve = { name: reports.length > 1 ? report.name : name, color: curveColor(i), dash: curveDash(i) };
    const dots = metric.kind === "point";
    if (metric.guessed)
      notes.push("A guess: the values of the tensor on which the script called backward().");
    if (!keep || dots) return curves.push({ ...curve, points, dots });
    return curves.push(
      { ...curve, points, faint: true },
      { ...curve, name: `${curve.name}, smoothed`, points: smoothed(points, keep) },
    );
  });
  return { curves, axis, log, left, words: notes[0] ?? "" };
}

function speedContent(reports, { axis, log, zeros, left }, heading) {
  // All curves have the same unit. The samples of a run may be unknown.
  const unknown = reports.some(({ progress }) => progress.length > 2 && !progress.at(-1)[1]);
  const unit = unknown ? "updates/s" : "samples/s";
  fill(heading, unit);
  const curves = reports.map((report, i) => ({
    name: reports.length > 1 ? report.name : unit,
    color: curveColor(i),
    dash: curveDash(i),
    points: speedOf(report.progress, unknown ? 2 : 1, axis, zeros[i]),
  }));
  return { curves, axis, log, left, from0: !log, words: "The speed of all workers together." };
}
