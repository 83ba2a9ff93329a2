// What curves show, computed from a report.
//
// A curve is {name, color, dash, dots, points}; a point is {x, y, words}. y is null where the value is not finite.

const AXES = [
  ["time", "time"],
  ["samples", "samples"],
  ["updates", "updates"],
];
const AT_AXIS = {
  time: (point) => point.time_s,
  samples: (point) => point.samples,
  updates: (point) => point.updates,
};

// The axes on which at least one point of the metrics and the progress differs from zero.
function possibleAxes(reports) {
  const points = reports.flatMap((report) => [
    ...report.metrics.flatMap((metric) => metric.points.slice(-1)),
    ...report.progress.slice(-1).map(([time_s, samples, updates]) => ({ time_s, samples, updates })),
  ]);
  const possible = AXES.map(([axis]) => axis).filter((axis) =>
    points.some((point) => AT_AXIS[axis](point) > 0),
  );
  return possible.length ? possible : ["time"];
}

// When a run began to train, according to its first points. Before this time, its processes started.
function trainedFrom(report) {
  const times = [report.progress[0]?.[0], ...report.metrics.map((metric) => metric.points[0]?.time_s)].filter(
    known,
  );
  return times.length ? Math.min(...times) : 0;
}

// The points of a metric; on the axis of time, from `zeroS` on.
function metricPoints(metric, axis, zeroS) {
  const zero = axis === "time" ? zeroS : 0;
  return metric.points.map((point) => ({ x: AT_AXIS[axis](point) - zero, y: point.value }));
}

// An exponential moving average, corrected at its beginning. Gaps stay gaps.
function smoothed(points, keep) {
  let [sum, weight] = [0, 0];
  return points.map((point) => {
    if (!known(point.y)) return point;
    sum = keep * sum + (1 - keep) * point.y;
    weight = keep * weight + (1 - keep);
    return { ...point, y: sum / weight };
  });
}

// The speed between points of the progress, over at most `most` equal parts of the run. `column` of the progress counts
// what the speed is about.
function speedOf(points, column, axis, zeroS, most = 120) {
  // at the end, workers may finish without further samples and updates
  const progress = points.filter(
    (point, i) => i < 1 || point[1] > points[i - 1][1] || point[2] > points[i - 1][2],
  );
  const last = progress.at(-1);
  if (!last || !(last[0] > 0)) return [];
  const places = { time: 0, samples: 1, updates: 2 };
  const widthS = (last[0] - progress[0][0]) / Math.min(most, progress.length);
  const zero = axis === "time" ? zeroS : 0;
  const speeds = [];
  let from = progress[0];
  for (const point of progress) {
    if (point[0] - from[0] < widthS * 0.999 || point[0] <= from[0]) continue;
    speeds.push({ x: point[places[axis]] - zero, y: (point[column] - from[column]) / (point[0] - from[0]) });
    from = point;
  }
  return speeds;
}

// The least and the largest finite y (and x) of all curves; null if no y is finite.
function extent(curves, { log = false } = {}) {
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const { points } of curves) {
    for (const { x, y } of points) {
      left = Math.min(left, x);
      right = Math.max(right, x);
      if (!known(y) || (log && y <= 0)) continue;
      low = Math.min(low, y);
      high = Math.max(high, y);
    }
  }
  return low <= high ? { left, right, low, high } : null;
}
