// Draws the timeline: one row per worker. Zoomed out, each column of pixels shows the shares of the kinds of time in
// its buckets. Zoomed in, the picture shows the exact iterations.

const GUTTER = 78; // the workers' names
const STRIP = 34; // the time and the marks, above the rows
const LEAST_ITERATION = 5; // pixels; narrower iterations are shown in buckets
const LEAST_COLUMN = 3; // pixels

const MARK_SIGNS = {
  joined: "+",
  left: "–",
  finished: "■",
  lost: "×",
  model: "◆",
  guard: "!",
  paused: "‖",
  note: "•",
};

function rowHeight(rows) {
  return rows <= 6 ? 30 : rows <= 16 ? 22 : 15;
}

// True if the exact iterations are known in the view, and wide enough to be seen.
function showsIterations({ timeline, rows }, view, width) {
  if (view.fromS < timeline.exact_from_s - 1e-9) return false;
  const most = mostIterations(rows, view.fromS, view.toS);
  return most > 0 && width / most >= LEAST_ITERATION;
}

// Fill the rows of a picture from a level. `buffer` is a Uint32Array of columns * pixels per row * rows.
function fillBuckets(buffer, columns, tall, level, rows, view) {
  const count = kinds.length;
  const colors = kinds.map((kind) => pixelOf(kind.color));
  const [spanS, widthS] = [view.toS - view.fromS, level.widthS];
  const sums = new Float64Array(count);
  for (let column = 0; column < columns; column += 1) {
    const first = Math.floor((view.fromS + (spanS * column) / columns) / widthS);
    const end = Math.max(first + 1, Math.floor((view.fromS + (spanS * (column + 1)) / columns) / widthS));
    if (end <= 0 || first >= level.buckets) continue;
    for (let i = 0; i < rows.length; i += 1) {
      const shares = level.shares[rows[i]];
      sums.fill(0);
      for (let at = Math.max(0, first); at < end && at < level.buckets; at += 1) {
        for (let kind = 0; kind < count; kind += 1) sums[kind] += shares[at * count + kind];
      }
      const unit = tall / (255 * (end - first));
      let [spent, below] = [0, 0];
      for (let kind = 0; kind < count; kind += 1) {
        if (!sums[kind]) continue;
        spent += sums[kind];
        const above = Math.min(tall, Math.round(spent * unit));
        let at = (i * tall + tall - 1 - below) * columns + column;
        for (; below < above; below += 1, at -= columns) buffer[at] = colors[kind];
      }
    }
  }
}

// A color as a pixel of ImageData, blended with the background of the page.
function pixelOf(color) {
  const [red, green, blue, opacity] = channels(color);
  const paper = channels(ink("--paper"));
  const mixed = [red, green, blue].map((part, i) => Math.round(part * opacity + paper[i] * (1 - opacity)));
  return ((255 << 24) | (mixed[2] << 16) | (mixed[1] << 8) | mixed[0]) >>> 0;
}

const raster = document.createElement("canvas");

// Draw buckets at a place of the canvas, in CSS pixels. `gap` is the space between two rows. The picture is drawn
// with few columns and then stretched. This is faster, and iterations that are hardly wider than a column do not
// flicker.
function drawBuckets(context, level, rows, view, { left, top, width, height, gap }) {
  if (!rows.length) return;
  const scale = context.getTransform().a;
  const columns = Math.max(1, Math.round(width / LEAST_COLUMN));
  const tall = Math.max(1, Math.round((height - gap) * scale));
  const painter = raster.getContext("2d", { willReadFrequently: true });
  if (raster.width !== columns || raster.height !== tall * rows.length) {
    Object.assign(raster, { width: columns, height: tall * rows.length });
  }
  const image = painter.createImageData(columns, tall * rows.length);
  fillBuckets(new Uint32Array(image.data.buffer), columns, tall, level, rows, view);
  painter.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  rows.forEach((_, i) => {
    context.drawImage(raster, 0, i * tall, columns, tall, left, top + i * height, width, height - gap);
  });
}

// Draw the exact iterations, one kind of time after another. Between iterations, draw what the buckets contain.
function drawIterations(context, content, rows, view, { left, top, width, height, gap }) {
  const { fromS, toS } = view;
  const pixels = width / (toS - fromS);
  const x = (timeS) => left + (Math.min(toS, Math.max(fromS, timeS)) - fromS) * pixels;
  const boxes = new Map(kinds.map((kind) => [kind.name, []]));
  const borders = [];
  rows.forEach((row, place) => {
    const y = top + place * height;
    const exact = content.rows[row];
    let doneS = fromS;
    const rest = (untilS) => {
      if ((untilS - doneS) * pixels < 1) return;
      const kind = idleKind(content.levels[0], row, doneS, untilS);
      if (kind) boxes.get(kind).push(x(doneS), y, x(untilS) - x(doneS));
    };
    for (
      let i = Math.max(0, iterationAt(exact, fromS));
      i < exact.begunS.length && exact.begunS[i] < toS;
      i += 1
    ) {
      let begin = exact.begunS[i];
      rest(begin);
      if (begin > fromS) borders.push(x(begin), y);
      for (let part = 0; part < PARTS.length; part += 1) {
        const end = exact.ends[i * PARTS.length + part];
        if (end > begin && end > fromS) boxes.get(PARTS[part]).push(x(begin), y, x(end) - x(begin));
        begin = end;
      }
      doneS = Math.max(doneS, begin);
    }
    rest(toS);
  });
  for (const { name, color } of kinds) {
    context.fillStyle = color;
    const found = boxes.get(name);
    for (let i = 0; i < found.length; i += 3)
      context.fillRect(found[i], found[i + 1], Math.max(0.5, found[i + 2]), height - gap);
  }
  context.fillStyle = ink("--paper");
  for (let i = 0; i < borders.length; i += 2) context.fillRect(borders[i], borders[i + 1], 1, height - gap);
}

const BETWEEN = ["paused", "outside", "idle", "loading"]; // what a worker may do between its iterations

function idleKind(level, row, fromS, toS) {
  const spentS = timeWithin(level, row, fromS, toS);
  const most = BETWEEN.reduce((found, kind) => (spentS[kind] > spentS[found] ? kind : found), BETWEEN[0]);
  return spentS[most] > 0.2 * (toS - fromS) ? most : null;
}

// Draw the times above the rows, and the marks and barriers on the rows.
function drawStrip(context, content, view, width, height, rowsTop) {
  const [left, right] = [GUTTER, width];
  const pixels = (right - left) / (view.toS - view.fromS);
  const x = (timeS) => left + (timeS - view.fromS) * pixels;
  context.textBaseline = "alphabetic";
  context.textAlign = "center";
  context.lineWidth = 1;
  const { step, values } = timeTicks(view.fromS, view.toS, Math.max(2, Math.floor((right - left) / 90)));
  for (const value of values) {
    context.strokeStyle = ink("--rule");
    line(context, Math.round(x(value)) + 0.5, STRIP - 5, Math.round(x(value)) + 0.5, STRIP);
    context.fillStyle = ink("--quiet");
    const text = clock(value, step, content.endS);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(right - half, Math.max(left + half, x(value))), 11);
  }
  const barriers = content.timeline.barriers_s.filter((timeS) => timeS >= view.fromS && timeS <= view.toS);
  if (barriers.length <= (right - left) / 16) {
    context.strokeStyle = ink("--text");
    context.globalAlpha = 0.6;
    for (const timeS of barriers)
      line(context, Math.round(x(timeS)) + 0.5, STRIP - 5, Math.round(x(timeS)) + 0.5, height);
    context.globalAlpha = 1;
  }
  for (const mark of content.marks) {
    if (mark.atS < view.fromS || mark.atS > view.toS) continue;
    const at = Math.min(right - 5, Math.max(left + 5, x(mark.atS)));
    context.fillStyle = mark.kind === "lost" || mark.kind === "guard" ? ink("--bad") : ink("--text");
    context.font = `bold ${FONT}`;
    context.fillText(MARK_SIGNS[mark.kind] ?? "•", at, STRIP - 8);
    context.font = FONT;
    if (mark.kind !== "model") continue;
    context.strokeStyle = ink("--text");
    context.setLineDash([4, 3]);
    line(context, Math.round(x(mark.atS)) + 0.5, rowsTop, Math.round(x(mark.atS)) + 0.5, height);
    context.setLineDash([]);
  }
}
