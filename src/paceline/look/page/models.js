// Staleness and waiting, for each time in which one sync model was in force.

const MOST_MODELS = 3; // if there are more, the reader chooses one model
const MOST_CELLS = 16; // with more workers, pairs are listed instead of a square of who waits for whom
const MOST_PAIRS = 20;

function modelsPanel() {
  const body = make("div");
  const chosen = make("select", { onchange: () => draw() });
  const choose = make("label", { class: "check" }, "Model in force", chosen);
  const root = section("Staleness and waiting", choose, body);
  let [panels, report] = [[], null];

  // Draw all models or, if there are many, the model that the reader has chosen.
  function draw() {
    const { models, timeline } = report;
    const shown = models.length > MOST_MODELS ? [models[Number(chosen.value)]] : models;
    if (panels.length !== shown.length) {
      panels = shown.map(modelPanel);
      fill(
        body,
        panels.map((panel) => panel.root),
      );
    }
    const level = timeline?.workers.length ? levelsOf(timeline)[0] : null;
    panels.forEach((panel, i) => panel.show(shown[i], report, level));
  }

  return {
    root,
    show: (next) => {
      report = next;
      const { models } = report;
      root.hidden = !models.length;
      choose.hidden = models.length <= MOST_MODELS;
      if (chosen.children.length !== models.length) {
        const before = chosen.value;
        fill(
          chosen,
          models.map((model, i) =>
            make("option", { value: i }, `${model.sync}, from ${duration(model.from_s)} on`),
          ),
        );
        chosen.value = before || String(longestModel(models));
      }
      draw();
    },
  };
}

function longestModel(models) {
  const lasted = (model) => model.to_s - model.from_s;
  return models.reduce((best, model, i) => (lasted(model) > lasted(models[best]) ? i : best), 0);
}

function modelPanel() {
  const title = make("h3");
  const facts = make("p", { class: "note" });
  const staleness = histogram("Staleness of the pushes", "staleness in updates");
  const lengths = histogram("Lengths of the waits", "length");
  let longest = 1;
  const reasons = table(
    "Waiting by reason",
    [
      { title: "reason", text: (row) => row.reason, wide: true },
      {
        title: "seconds",
        value: (row) => row.total_s,
        text: (row) => fixed(row.total_s, decimalsFor(longest)),
        share: (row) => row.total_s / longest,
        number: true,
      },
      { title: "waits", value: (row) => row.count, text: (row) => whole(row.count), number: true },
      {
        title: "mean",
        value: (row) => row.total_s / row.count,
        text: (row) => duration(row.count ? row.total_s / row.count : null),
        number: true,
      },
    ],
    { tall: true },
  );
  const noWaiting = make("p", { class: "note" }, "No worker has waited.");
  const between = make("div");
  const root = make(
    "div",
    { class: "model" },
    title,
    facts,
    make("div", { class: "charts" }, staleness.root, lengths.root),
    make("div", { class: "pair" }, subsection("Waiting by reason", noWaiting, reasons.root), between),
  );
  return {
    root,
    show: (model, report, level) => {
      fill(title, model.sync);
      const updates = model.staleness.reduce((sum, [value, count]) => sum + value * count, 0);
      const pushes = model.staleness.reduce((sum, [, count]) => sum + count, 0);
      const waitedS = model.waiting.reduce((sum, row) => sum + row.total_s, 0);
      fill(
        facts,
        [
          `In force from ${duration(model.from_s)} to ${duration(model.to_s)}, ${plural(model.updates, "update")}.`,
          pushes && `Mean staleness ${short(updates / pushes)} updates.`,
          waitedS > 0 && `Waiting ${duration(waitedS)} in total, of all workers.`,
        ]
          .filter(Boolean)
          .join(" "),
      );
      staleness.show(barsOfCounts(model.staleness, "update"));
      lengths.show(barsOfLengths(model.wait_lengths));
      longest = Math.max(...model.waiting.map((row) => row.total_s), 1e-9);
      reasons.show(model.waiting);
      noWaiting.hidden = model.waiting.length > 0;
      const pairs = level ? waitsBetween(report.timeline, level, model.from_s, model.to_s) : [];
      fill(
        between,
        pairs.length > 0 &&
          (report.timeline.workers.length <= MOST_CELLS
            ? waitSquare(report.timeline.workers, pairs)
            : waitPairs(pairs)),
      );
    },
  };
}

// One row for each worker that waits, and one column for each awaited worker.
function waitSquare(workers, pairs) {
  const most = pairs[0].waitedS;
  const seconds = new Map(pairs.map((pair) => [`${pair.worker} ${pair.awaited}`, pair.waitedS]));
  const cell = (worker, awaited) => {
    const waitedS = seconds.get(`${worker} ${awaited}`) ?? 0;
    const shade = make("span", { class: "shade", style: { opacity: String((0.55 * waitedS) / most) } });
    return make(
      "td",
      { class: "number" },
      shade,
      make("span", {}, waitedS ? fixed(waitedS, decimalsFor(most)) : "·"),
    );
  };
  const square = make(
    "table",
    { class: "square" },
    make("caption", { class: "spoken" }, "Seconds for which one worker has waited for another"),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        make("th", { scope: "col" }, "waits ↓  for →"),
        workers.map((each) => make("th", { scope: "col", class: "number" }, String(each))),
      ),
    ),
    make(
      "tbody",
      {},
      workers.map((worker) =>
        make(
          "tr",
          {},
          make("th", { scope: "row" }, `worker ${worker}`),
          workers.map((each) => cell(worker, each)),
        ),
      ),
    ),
  );
  return subsection("Who waits for whom, in seconds", scrollBox("Who waits for whom", "scroll", square));
}

function waitPairs(pairs) {
  const most = pairs[0].waitedS;
  const found = table(
    "Who waits for whom",
    [
      { title: "waits", value: (row) => row.worker, text: (row) => `worker ${row.worker}` },
      { title: "for", value: (row) => row.awaited, text: (row) => `worker ${row.awaited}` },
      {
        title: "seconds",
        value: (row) => row.waitedS,
        text: (row) => fixed(row.waitedS, decimalsFor(most)),
        share: (row) => row.waitedS / most,
        number: true,
      },
    ],
    { tall: true },
  );
  found.show(pairs.slice(0, MOST_PAIRS));
  const words =
    pairs.length > MOST_PAIRS
      ? `Who waits for whom: the longest ${MOST_PAIRS} of ${whole(pairs.length)} pairs`
      : "Who waits for whom";
  return subsection(words, found.root);
}
