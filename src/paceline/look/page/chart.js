// A chart of curves. The values under the pointer or the focus are shown in words, and all values in a table.

const MARGIN = { left: 54, right: 14, top: 10, bottom: 22 };
const CHART_HEIGHT = 190;

// `show({curves, axis, log, left, from0, words})`: `axis` is "time", "samples" or "updates"; `left` is where the axis
// of time begins; `from0` is true if the values are shown from 0 on.
function chart(title) {
  let content = { curves: [], axis: "time", log: false, from0: false };
  let place = null; // {curve, index} under the pointer or the focus
  const picture = drawing(CHART_HEIGHT, (context, width, height) =>
    drawChart(context, width, height, content, place),
  );
  const frame = make(
    "div",
    {
      class: "frame",
      tabindex: 0,
      role: "group",
      "aria-label": `${title}. The left and right arrows go from point to point.`,
      onpointermove: (event) => point(nearestAt(content, picture.canvas, event), false),
      onpointerleave: () => point(null, false),
      onblur: () => point(null, false),
      onkeydown: (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step) return;
        event.preventDefault();
        point(stepped(content, place, step), true);
      },
    },
    picture.canvas,
  );
  const words = tip(frame);
  const note = make("p", { class: "note" });
  const data = details("Data", () => chartTable(title, () => content));
  const heading = make("figcaption", {}, title);
  const root = make("figure", { class: "chart" }, heading, frame, note, data.root);

  function point(found, spoken) {
    place = found;
    picture.redraw();
    if (!found) return words.hide();
    const { curves, axis } = content;
    const { x, y } = curves[found.curve].points[found.index];
    const lines = [
      `${curves[found.curve].name}: ${known(y) ? short(y) : "NaN or infinite"}`,
      `at ${axisText(x, axis)}`,
    ];
    const scale = scaleOf(content, picture.canvas.clientWidth, picture.canvas.clientHeight);
    words.at(scale ? scale.x(x) : 0, scale && visible(y, content) ? scale.y(y) : MARGIN.top + 30, lines);
    if (spoken) words.say(lines);
  }

  return {
    root,
    heading,
    show: (next) => {
      content = next;
      if (place && !content.curves[place.curve]?.points[place.index]) place = null;
      fill(note, noteOf(content));
      picture.label(chartWords(title, content));
      picture.redraw();
      data.show();
    },
  };
}

// What the reader should know about the curves.
function noteOf({ curves, log, words }) {
  const are = (count) => (count === 1 ? "is" : "are");
  const count = (chosen) =>
    curves.reduce((sum, { points }) => sum + points.filter(({ y }) => chosen(y)).length, 0);
  const notes = words ? [words] : [];
  const gaps = count((y) => !known(y));
  const hidden = log ? count((y) => known(y) && y <= 0) : 0;
  if (gaps && !extent(curves)) notes.push("All values are NaN or infinite.");
  else if (gaps) notes.push(`${plural(gaps, "value")} at × ${are(gaps)} NaN or infinite.`);
  if (hidden)
    notes.push(
      `${plural(hidden, "value")} that ${are(hidden)} not positive cannot be shown on a logarithmic scale.`,
    );
  return notes.join(" ");
}

const visible = (y, { log }) => known(y) && !(log && y <= 0);

function axisText(x, axis) {
  return axis === "time" ? duration(x) : `${whole(x)} ${axis}`;
}

function chartWords(title, content) {
  const range = extent(content.curves);
  if (!range) return `${title}: no finite values.`;
  const each = content.curves.map(({ name, points }) => {
    const found = points.filter(({ y }) => known(y));
    return found.length
      ? `${name} goes from ${short(found[0].y)} to ${short(found.at(-1).y)}`
      : `${name} has no finite values`;
  });
  const places = `${axisText(range.left, content.axis)} to ${axisText(range.right, content.axis)}`;
  return `Chart of ${title} over ${content.axis}, ${places}: ${each.join("; ")}.`;
}

// The points of the curves as a table. `now` returns the content of the chart.
function chartTable(title, now) {
  const inTime = () => now().axis === "time";
  const { root, show } = table(
    `Data of ${title}`,
    [
      {
        title: () => (inTime() ? "time, s" : now().axis),
        value: (row) => row.x,
        text: (row) => (inTime() ? fixed(row.x, 3) : whole(row.x)),
        number: true,
      },
      { title: "curve", text: (row) => row.name, needed: () => now().curves.length > 1 },
      {
        title: "value",
        value: (row) => row.y,
        text: (row) => (known(row.y) ? short(row.y) : "NaN or infinite"),
        number: true,
      },
    ],
    { tall: true },
  );
  const rows = () => now().curves.flatMap(({ name, points }) => points.map(({ x, y }) => ({ name, x, y })));
  return { root, show: () => show(rows()) };
}

function scaleOf({ curves, axis, log, from0, left: leftS = 0 }, width, height) {
  const range = extent(curves, { log });
  if (!range) return null;
  let { low, high } = range;
  if (from0) low = Math.min(0, low);
  const plot = {
    left: MARGIN.left,
    right: width - MARGIN.right,
    top: MARGIN.top,
    bottom: height - MARGIN.bottom,
  };
  const lines = Math.max(2, Math.floor((plot.bottom - plot.top) / 36));
  if (log) {
    if (high / low < 1.05) [low, high] = [low / 1.5, high * 1.5];
  } else if (high - low <= Math.abs(high) * 1e-9) {
    [low, high] = [low - Math.max(Math.abs(low) * 0.1, 1e-9), high + Math.max(Math.abs(high) * 0.1, 1e-9)];
  } else {
    high += (high - low) * 0.04;
    if (!from0) low -= (high - low) * 0.04;
  }
  const left = Math.min(axis === "time" ? leftS : 0, range.left);
  const right = range.right > left ? range.right : left + 1;
  const count = Math.max(2, Math.floor((plot.right - plot.left) / 80));
  const at = log ? Math.log : (value) => value;
  return {
    plot,
    x: (x) => plot.left + ((x - left) / (right - left)) * (plot.right - plot.left),
    y: (y) => plot.bottom - ((at(y) - at(low)) / (at(high) - at(low))) * (plot.bottom - plot.top),
    xTicks: axis === "time" ? timeTicks(left, right, count) : ticks(left, right, count),
    yTicks: log ? logTicks(low, high, lines) : ticks(low, high, lines),
    right,
  };
}

function drawChart(context, width, height, content, place) {
  const scale = scaleOf(content, width, height);
  if (!scale) {
    context.fillStyle = ink("--quiet");
    context.textAlign = "center";
    context.fillText("no finite values", width / 2, height / 2);
    return;
  }
  drawAxes(context, scale, content.axis);
  const { plot } = scale;
  for (const curve of content.curves) {
    drawCurve(context, scale, curve, content);
    context.strokeStyle = ink("--bad");
    context.lineWidth = 1.5;
    context.setLineDash([]);
    for (const { x, y } of curve.points) if (!known(y)) drawCross(context, scale.x(x), plot.top + 5);
  }
  if (place) {
    const { x, y } = content.curves[place.curve].points[place.index];
    context.strokeStyle = ink("--quiet");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(Math.round(scale.x(x)) + 0.5, plot.top);
    context.lineTo(Math.round(scale.x(x)) + 0.5, plot.bottom);
    context.stroke();
    if (visible(y, content))
      drawDot(context, scale.x(x), scale.y(y), 4, readable(content.curves[place.curve].color));
  }
}

function drawAxes(context, { plot, x, y, xTicks, yTicks, right }, axis) {
  context.strokeStyle = ink("--rule");
  context.fillStyle = ink("--quiet");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of yTicks.values) {
    const level = Math.round(y(value)) + 0.5;
    if (level < plot.top - 1 || level > plot.bottom + 1) continue;
    line(context, plot.left, level, plot.right, level);
    context.fillText(tickText(value, yTicks.step), plot.left - 6, level);
  }
  context.textBaseline = "alphabetic";
  let free = -Infinity;
  for (const value of xTicks.values) {
    const text = axis === "time" ? clock(value, xTicks.step, right) : tickText(value, xTicks.step);
    const wide = context.measureText(text).width;
    const middle = Math.min(
      Math.max(x(value), plot.left + wide / 2 - 8),
      plot.right + MARGIN.right - wide / 2,
    );
    if (middle - wide / 2 < free + 10) continue;
    free = middle + wide / 2;
    context.textAlign = "center";
    context.fillText(text, middle, plot.bottom + 16);
    line(context, Math.round(x(value)) + 0.5, plot.bottom, Math.round(x(value)) + 0.5, plot.bottom + 4);
  }
  context.strokeStyle = ink("--quiet");
  line(context, plot.left, plot.bottom + 0.5, plot.right, plot.bottom + 0.5);
}

function drawCurve(context, { x, y }, curve, content) {
  context.strokeStyle = readable(curve.color);
  context.globalAlpha = curve.faint ? 0.28 : 1;
  context.lineWidth = curve.faint ? 1 : 1.7;
  context.lineJoin = "round";
  context.setLineDash(curve.dash ?? []);
  context.beginPath();
  const alone = []; // points between two gaps
  let drawn = false; // true while the line goes on from the previous point
  curve.points.forEach((point, i) => {
    if (!visible(point.y, content)) {
      drawn = false;
      return;
    }
    if (drawn) context.lineTo(x(point.x), y(point.y));
    else context.moveTo(x(point.x), y(point.y));
    const next = curve.points[i + 1];
    if (!drawn && !(next && visible(next.y, content))) alone.push(point);
    drawn = true;
  });
  context.stroke();
  context.setLineDash([]);
  for (const point of curve.dots ? curve.points : alone) {
    if (visible(point.y, content))
      drawDot(context, x(point.x), y(point.y), curve.dots ? 3 : 2, readable(curve.color));
  }
  context.globalAlpha = 1;
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function drawDot(context, x, y, radius, color) {
  context.fillStyle = color;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

function drawCross(context, x, y) {
  line(context, x - 3, y - 3, x + 3, y + 3);
  line(context, x - 3, y + 3, x + 3, y - 3);
}

// The point of a curve that is nearest to the pointer; the horizontal distance counts most.
function nearestAt(content, canvas, event) {
  const box = canvas.getBoundingClientRect();
  const scale = scaleOf(content, box.width, box.height);
  if (!scale) return null;
  const [left, top] = [event.clientX - box.left, event.clientY - box.top];
  let [found, least] = [null, Infinity];
  content.curves.forEach((curve, index) => {
    if (curve.faint) return;
    curve.points.forEach((point, i) => {
      const down = visible(point.y, content) ? scale.y(point.y) - top : 0;
      const distance = Math.abs(scale.x(point.x) - left) + Math.abs(down) / 20;
      if (distance < least) [found, least] = [{ curve: index, index: i }, distance];
    });
  });
  return found;
}

function stepped({ curves }, place, step) {
  const curve =
    place?.curve ??
    Math.max(
      0,
      curves.findIndex((each) => !each.faint),
    );
  const count = curves[curve]?.points.length ?? 0;
  if (!count) return null;
  return { curve, index: Math.min(count - 1, Math.max(0, (place?.index ?? (step > 0 ? -1 : count)) + step)) };
}
