// The beginning of the page: what the run was, what took the time, and what would help.

const STATE_WORDS = {
  running: "running",
  finished: "finished",
  interrupted: "interrupted",
  failed: "failed",
  "cut off": "cut off: it was killed, and left no summary",
};

function begunWords(begunAt) {
  const found = begunAt.match(/^(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(?::\d\d(?:\.\d+)?)?(Z|[+-]\d\d:?\d\d)?$/);
  if (!found) return begunAt;
  const zone = found[3] === undefined ? "" : ` UTC${found[3] === "Z" ? "" : found[3]}`;
  return `${found[1]} ${found[2]}${zone}`;
}

function headerPanel(...tools) {
  const title = make("h1");
  const facts = make("p", { class: "facts" });
  const headline = make("p", { class: "headline" });
  const why = make("code");
  const whyTitle = make("b");
  const failure = make(
    "div",
    { class: "failure", hidden: true },
    whyTitle,
    scrollBox("Why it failed", "pre", why),
  );
  const root = make(
    "header",
    {},
    make("div", { class: "titles" }, title, make("div", { class: "corner" }, tools)),
    facts,
    headline,
    failure,
  );
  return {
    root,
    show: (report) => {
      fill(title, report.name || "run");
      fill(
        facts,
        make("span", { class: `state ${report.state.replace(" ", "-")}` }, STATE_WORDS[report.state]),
        report.begun_at && make("span", {}, `begun ${begunWords(report.begun_at)}`),
        make(
          "span",
          {},
          report.state === "running"
            ? `for ${duration(report.now_s ?? report.duration_s)}`
            : `took ${duration(report.duration_s)}`,
        ),
        report.workers.length > 0 && make("span", {}, plural(report.workers.length, "worker")),
        report.version && make("span", {}, `Paceline ${report.version}`),
        report.emulated && make("span", {}, report.emulated),
      );
      fill(headline, report.headline);
      failure.hidden = !report.failure;
      fill(whyTitle, report.state === "failed" ? "Why it failed" : "Why it ended");
      if (why.textContent !== report.failure) fill(why, report.failure);
    },
  };
}

function causesPanel() {
  const time = make("div", { class: "alltime" });
  const list = make("ol", { class: "causes" });
  const root = section("What took the time, and what would help", time, list);
  return {
    root,
    show: (report) => {
      const total = totalTime(report.workers);
      const spent = sumOf(total);
      fill(
        time,
        spent > 0 && [
          make("p", { class: "label" }, `The time of all workers together, ${duration(spent)}`),
          stackedBar(total),
          legend(total),
        ],
      );
      fill(
        list,
        report.causes.length
          ? report.causes.map(causeItem)
          : make("li", { class: "nothing" }, nothingWords(report, spent)),
      );
    },
  };
}

function nothingWords(report, spent) {
  if (spent > 0) return "Nothing stands out: the workers lost little time.";
  return report.state === "running" ? "Nothing is known yet." : "Nothing is known about the workers' time.";
}

function causeItem(cause) {
  const figures = [
    known(cause.lost_s) && duration(cause.lost_s),
    known(cause.share) && `${percent(cause.share)} of the workers' time`,
  ].filter(Boolean);
  return make(
    "li",
    {},
    make("p", { class: "words" }, cause.words),
    figures.length > 0 &&
      make(
        "div",
        { class: "loss" },
        known(cause.share) &&
          make(
            "span",
            { class: "track" },
            make("span", { style: { width: `${100 * Math.min(1, cause.share)}%` } }),
          ),
        make("span", {}, figures.join(", ")),
      ),
    cause.remedies.length > 0 &&
      make(
        "div",
        { class: "remedies" },
        make("b", {}, "What would help"),
        make(
          "ul",
          {},
          cause.remedies.map((remedy) => make("li", {}, remedy)),
        ),
      ),
  );
}
