// Says in words what the timeline shows at a place.

const DID = {
  computing: "computed",
  transfer: "transferred data",
  waiting: "waited",
  wasted: "computed in vain",
  paused: "was paused, as the run had too few workers,",
  outside: "did not train",
  idle: "had finished",
  loading: "loaded batches",
};

function placeWords(content, row, timeS, exact, pixelS) {
  const worker = content.timeline.workers[row];
  const part = exact ? partAt(content.rows[row], timeS) : null;
  const at = (s, stepS) => clock(s, stepS, content.endS);
  if (part) {
    const stepS = Math.max(1e-4, 10 ** Math.floor(Math.log10(Math.max(1e-4, part.toS - part.fromS))) / 10);
    const whom = part.awaited >= 0 ? ` for worker ${part.awaited}` : "";
    return [
      `Worker ${worker} ${DID[part.kind]}${whom} for ${duration(part.toS - part.fromS)}`,
      `from ${at(part.fromS, stepS)} on`,
    ];
  }
  const level = levelFor(content.levels, pixelS);
  const bucket = Math.floor(timeS / level.widthS);
  if (bucket < 0 || bucket >= level.buckets)
    return [`Worker ${worker} at ${at(timeS, pixelS)}: nothing is known`];
  const [fromS, toS] = [bucket * level.widthS, (bucket + 1) * level.widthS];
  const spent = partsOf(timeWithin(level, row, fromS, toS)).filter((each) => each.s >= 0.005 * level.widthS);
  const lines = spent
    .sort((a, b) => b.s - a.s)
    .map((each) => {
      const awaited = each.name === "waiting" ? level.awaited[row][bucket] : -1;
      const whom = awaited >= 0 ? `, longest for worker ${awaited}` : "";
      return `${kindWord(each.name)} ${percent(each.s / level.widthS)}${whom}`;
    });
  return [
    `Worker ${worker}, ${at(fromS, level.widthS)} to ${at(toS, level.widthS)}`,
    ...(lines.length ? lines : ["absent"]),
  ];
}

function markWords(content, mark) {
  return [mark.words, `at ${clock(mark.time_s, Math.max(0.01, content.endS / 1000), content.endS)}`];
}

function timelineWords(content, view, exact) {
  const count = plural(content.timeline.workers.length, "worker");
  const span = `${clock(view.fromS, 0.1, content.endS)} to ${clock(view.toS, 0.1, content.endS)}`;
  const how = exact ? "as exact iterations" : "as shares of time";
  return `Timeline of ${count}, ${span}, ${how}. The data below say the same in figures.`;
}
