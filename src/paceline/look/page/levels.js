// What the workers did over time, in buckets: as recorded, and in ever coarser levels for zooming out.
//
// A level is {widthS, buckets, shares, awaited}. For each worker, `shares` has one byte for each kind in each bucket,
// with the kinds of a bucket side by side, and `awaited` has the other worker for which this worker has waited
// longest in each bucket.

const FACTOR = 4; // this number of buckets become one bucket in the next level
const COARSE = 512; // a level with at most this number of buckets has no coarser level

const levelsOfTimelines = new WeakMap();

function levelsOf(timeline) {
  if (!levelsOfTimelines.has(timeline)) levelsOfTimelines.set(timeline, madeLevels(timeline));
  return levelsOfTimelines.get(timeline);
}

function madeLevels(timeline) {
  const levels = [
    {
      widthS: timeline.width_s,
      buckets: timeline.buckets,
      shares: timeline.shares.map(bytesOf),
      awaited: timeline.awaited.map((text) => new Int16Array(bytesOf(text).buffer)),
    },
  ];
  while (levels.at(-1).buckets > COARSE) levels.push(coarser(levels.at(-1)));
  return levels;
}

function coarser(level) {
  const count = kinds.length;
  const waiting = kinds.findIndex((kind) => kind.name === "waiting");
  const buckets = Math.ceil(level.buckets / FACTOR);
  const shares = level.shares.map((fine) => {
    const coarse = new Uint8Array(buckets * count);
    const stride = FACTOR * count;
    const halves = FACTOR / 2;
    const end = fine.length;
    for (let bucket = 0; bucket < buckets; bucket += 1) {
      const from = bucket * stride;
      for (let kind = 0; kind < count; kind += 1) {
        let sum = halves;
        for (let at = from + kind; at < from + stride && at < end; at += count) sum += fine[at];
        coarse[bucket * count + kind] = Math.floor(sum / FACTOR);
      }
    }
    return coarse;
  });
  const awaited = level.awaited.map((fine, row) => {
    const coarse = new Int16Array(buckets).fill(-1);
    const spent = level.shares[row];
    for (let bucket = 0; bucket < buckets; bucket += 1) {
      let longest = 0;
      const end = Math.min(level.buckets, (bucket + 1) * FACTOR);
      for (let at = bucket * FACTOR; at < end; at += 1) {
        if (fine[at] < 0 || spent[at * count + waiting] <= longest) continue;
        longest = spent[at * count + waiting];
        coarse[bucket] = fine[at];
      }
    }
    return coarse;
  });
  return { widthS: level.widthS * FACTOR, buckets, shares, awaited };
}

// The coarsest level whose buckets are at most `widthS` wide.
function levelFor(levels, widthS) {
  return levels.findLast((level) => level.widthS <= widthS) ?? levels[0];
}

// The time from the first to the last bucket in which a worker did something; null if there is no such bucket.
function extentOf({ widthS, buckets, shares }) {
  const used = (bucket) =>
    shares.some((row) => row.subarray(bucket * kinds.length, (bucket + 1) * kinds.length).some(Boolean));
  let [first, last] = [0, buckets - 1];
  while (first <= last && !used(first)) first += 1;
  while (last > first && !used(last)) last -= 1;
  return first <= last
    ? { startS: first * widthS, endS: Math.max((last + 1) * widthS, first * widthS + 1e-3) }
    : null;
}

// The mean shares of all workers, in one row, at the coarsest level.
function meanLevel(levels) {
  const level = levels.at(-1);
  const sums = new Float64Array(level.buckets * kinds.length);
  for (const row of level.shares) for (let i = 0; i < sums.length; i += 1) sums[i] += row[i];
  const mean = Uint8Array.from(sums, (sum) => Math.round(sum / Math.max(1, level.shares.length)));
  return { ...level, shares: [mean], awaited: [] };
}

// Seconds of each kind that a row has spent from one time to another.
function timeWithin(level, row, fromS, toS) {
  const sums = new Float64Array(kinds.length);
  const shares = level.shares[row];
  const first = Math.max(0, Math.floor(fromS / level.widthS));
  const end = Math.min(level.buckets, Math.ceil(toS / level.widthS));
  for (let bucket = first; bucket < end; bucket += 1) {
    const begun = bucket * level.widthS;
    const seconds = Math.min(toS, begun + level.widthS) - Math.max(fromS, begun);
    for (let kind = 0; kind < sums.length; kind += 1)
      sums[kind] += (shares[bucket * kinds.length + kind] / 255) * seconds;
  }
  return Object.fromEntries(kinds.map((kind, i) => [kind.name, sums[i]]));
}

// Who waited for whom: rows [waiting worker, awaited worker, seconds], longest first. In each bucket, the whole wait
// counts for the worker that was awaited longest.
function waitsBetween(timeline, level, fromS, toS) {
  const waiting = kinds.findIndex((kind) => kind.name === "waiting");
  const first = Math.max(0, Math.floor(fromS / level.widthS));
  const end = Math.min(level.buckets, Math.ceil(toS / level.widthS));
  const [found, count] = [[], kinds.length];
  const spent = new Float64Array(1 + Math.max(0, ...timeline.workers)); // awaited worker -> sum of the shares
  timeline.workers.forEach((worker, row) => {
    const [shares, awaited] = [level.shares[row], level.awaited[row]];
    spent.fill(0);
    for (let bucket = first; bucket < end; bucket += 1) {
      if (awaited[bucket] >= 0) spent[awaited[bucket]] += shares[bucket * count + waiting];
    }
    spent.forEach((sum, other) => {
      if (sum > 0) found.push({ worker, awaited: other, waitedS: (sum / 255) * level.widthS });
    });
  });
  return found.sort((a, b) => b.waitedS - a.waitedS);
}
