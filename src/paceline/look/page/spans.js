// The exact iterations of the workers, where they are known.

const UNIT_S = 1e-4;
const PARTS = ["wasted", "computing", "transfer", "waiting", "transfer"]; // of one iteration, in this order

// For each row: {begunS, ends, awaited}; `ends` has five numbers for each iteration: when its parts end.
function exactRows(timeline) {
  const found = new Map(timeline.spans.map((spans) => [spans.worker, spans]));
  return timeline.workers.map((worker) => {
    const spans = found.get(worker);
    if (!spans) return { begunS: new Float64Array(0), ends: new Float64Array(0), awaited: [] };
    const begunS = Float64Array.from(spans.begun, (begun) => begun * UNIT_S);
    const ends = new Float64Array(begunS.length * PARTS.length);
    spans.lengths.forEach((lengths, i) => {
      let end = begunS[i];
      lengths.forEach((length, part) => {
        end += length * UNIT_S;
        ends[i * PARTS.length + part] = end;
      });
    });
    return { begunS, ends, awaited: spans.awaited };
  });
}

// The index of the last iteration that has begun at a time; -1 if no iteration has begun.
function iterationAt({ begunS }, timeS) {
  let [low, high] = [0, begunS.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (begunS[middle] <= timeS) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// What a worker did at a time: {kind, fromS, toS, awaited}; null between its iterations.
function partAt(row, timeS) {
  const i = iterationAt(row, timeS);
  if (i < 0) return null;
  let fromS = row.begunS[i];
  for (let part = 0; part < PARTS.length; part += 1) {
    const toS = row.ends[i * PARTS.length + part];
    if (timeS < toS)
      return { kind: PARTS[part], fromS, toS, awaited: PARTS[part] === "waiting" ? row.awaited[i] : -1 };
    fromS = toS;
  }
  return null;
}

// The largest number of iterations that any row has in a span of time.
function mostIterations(rows, fromS, toS) {
  return rows.reduce((most, row) => Math.max(most, iterationAt(row, toS) - iterationAt(row, fromS) + 1), 0);
}
