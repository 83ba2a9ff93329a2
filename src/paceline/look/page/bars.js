// Bars of the workers' time, and the legend of its colors.

let kinds = []; // {name, color}, from the data of the page, in the order of the stacks

// What the page calls the kinds of time, and what they mean.
const KIND_WORDS = {
  computing: ["computing", "computations that were pushed"],
  transfer: ["transfer", "messages on their way"],
  waiting: ["waiting", "pulls that were not answered at once"],
  wasted: ["wasted", "computations that were aborted"],
  paused: ["paused", "the run had too few workers"],
  outside: ["outside training", "the script evaluated or saved the model, or waited in a barrier"],
  idle: ["idle at the end", "the worker had finished before the other workers"],
  loading: ["loading", "the script asked a loader for batches"],
};

const kindWord = (name) => KIND_WORDS[name][0];

function sumOf(timeS) {
  return kinds.reduce((sum, kind) => sum + (timeS[kind.name] ?? 0), 0);
}

// The kinds of time that occur, largest first.
function partsOf(timeS) {
  const total = sumOf(timeS);
  return kinds
    .map((kind) => ({
      ...kind,
      s: timeS[kind.name] ?? 0,
      share: total ? (timeS[kind.name] ?? 0) / total : 0,
    }))
    .filter((part) => part.s > 0);
}

// One stacked bar; `filledS` is the time that fills it.
function stackedBar(timeS, filledS = sumOf(timeS)) {
  const parts = partsOf(timeS);
  const words = parts
    .map((part) => `${kindWord(part.name)} ${duration(part.s)} (${percent(part.share)})`)
    .join(", ");
  return make(
    "div",
    { class: "stack", role: "img", "aria-label": words || "no time", title: words },
    parts.map((part) =>
      make("span", { style: { width: `${(100 * part.s) / (filledS || 1)}%`, background: part.color } }),
    ),
  );
}

function swatch(color) {
  return make("span", { class: "swatch", style: { background: color } });
}

// The kinds of time that occur, each with its color and, if `shares` is true, with its share.
function legend(timeS, shares = true) {
  const parts = partsOf(timeS);
  return make(
    "ul",
    { class: "legend" },
    parts.map((part) =>
      make(
        "li",
        { title: KIND_WORDS[part.name][1] },
        swatch(part.color),
        shares
          ? [kindWord(part.name), " ", make("b", {}, percent(part.share)), ` ${duration(part.s)}`]
          : kindWord(part.name),
      ),
    ),
  );
}

function totalTime(workers) {
  const total = {};
  for (const worker of workers) {
    for (const [kind, s] of Object.entries(worker.time_s)) total[kind] = (total[kind] ?? 0) + s;
  }
  return total;
}
