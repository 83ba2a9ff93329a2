// A histogram of upright bars. The number under the pointer or the focus is shown in words, and all numbers in a
// table.

const MOST_BARS = 48;

// `show(bars)`: a bar is {from, to, count, words}; `words` says which values it counts.
function histogram(title, unit) {
  let [bars, at] = [[], -1];
  const picture = drawing(150, (context, width, height) => drawBars(context, width, height, bars, at));
  const frame = make(
    "div",
    {
      class: "frame",
      tabindex: 0,
      role: "group",
      "aria-label": `${title}. The left and right arrows go from bar to bar.`,
      onpointermove: (event) => {
        const box = picture.canvas.getBoundingClientRect();
        const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
        point(share >= 0 && share < 1 ? Math.floor(share * bars.length) : -1, false);
      },
      onpointerleave: () => point(-1, false),
      onblur: () => point(-1, false),
      onkeydown: (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step || !bars.length) return;
        event.preventDefault();
        point(Math.min(bars.length - 1, Math.max(0, at + step)), true);
      },
    },
    picture.canvas,
  );
  const words = tip(frame);
  const data = details("Data", () => {
    const { root, show } = table(
      title,
      [
        { title: unit, text: (bar) => bar.words, sortable: false },
        { title: "number", value: (bar) => bar.count, text: (bar) => whole(bar.count), number: true },
      ],
      { tall: true },
    );
    return { root, show: () => show(bars) };
  });
  const root = make("figure", { class: "chart" }, make("figcaption", {}, title), frame, data.root);

  function point(index, spoken) {
    at = index;
    picture.redraw();
    if (index < 0 || !bars[index]) return words.hide();
    const total = bars.reduce((sum, bar) => sum + bar.count, 0);
    const lines = [
      bars[index].words,
      `${whole(bars[index].count)} of ${whole(total)} (${percent(bars[index].count / total)})`,
    ];
    const wide = picture.canvas.clientWidth - MARGIN.left - MARGIN.right;
    words.at(MARGIN.left + (wide * (index + 0.5)) / bars.length, 60, lines);
    if (spoken) words.say(lines);
  }

  return {
    root,
    show: (next) => {
      bars = next;
      root.hidden = !bars.some((bar) => bar.count);
      const most = bars.reduce((found, bar) => (bar.count > found.count ? bar : found), bars[0] ?? null);
      picture.label(
        most ? `Histogram: ${title}. Most often: ${most.words}, ${whole(most.count)} times.` : title,
      );
      picture.redraw();
      data.show();
    },
  };
}

function drawBars(context, width, height, bars, at) {
  const plot = {
    left: MARGIN.left,
    right: width - MARGIN.right,
    top: MARGIN.top,
    bottom: height - MARGIN.bottom,
  };
  const most = Math.max(1, ...bars.map((bar) => bar.count));
  const y = (count) => plot.bottom - (count / (most * 1.04)) * (plot.bottom - plot.top);
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const { step, values } = ticks(0, most, 3);
  for (const value of values.filter(Number.isInteger)) {
    const level = Math.round(y(value)) + 0.5;
    context.strokeStyle = ink("--rule");
    line(context, plot.left, level, plot.right, level);
    context.fillStyle = ink("--quiet");
    context.fillText(tickText(value, step), plot.left - 6, level);
  }
  const wide = Math.min(60, (plot.right - plot.left) / bars.length);
  context.textBaseline = "alphabetic";
  context.textAlign = "center";
  let free = -Infinity;
  bars.forEach((bar, i) => {
    const left = plot.left + ((plot.right - plot.left) * i) / bars.length;
    const slot = (plot.right - plot.left) / bars.length;
    const gap = slot > 4 ? 1 : 0;
    const middle = left + slot / 2;
    context.fillStyle = i === at ? ink("--text") : ink("--bar");
    const top = bar.count ? Math.min(y(bar.count), plot.bottom - 1) : plot.bottom;
    context.fillRect(middle - wide / 2 + gap, top, wide - 2 * gap, plot.bottom - top);
    const half = context.measureText(bar.label).width / 2;
    if (middle - half < free + 8 || middle + half > width) return;
    free = middle + half;
    context.fillStyle = ink("--quiet");
    context.fillText(bar.label, middle, plot.bottom + 16);
  });
  context.strokeStyle = ink("--quiet");
  line(context, plot.left, plot.bottom + 0.5, plot.right, plot.bottom + 0.5);
}

// Bars for whole numbers, from [value, count] in ascending order; several values share a bar if there are many.
function barsOfCounts(counts, noun) {
  if (!counts.length) return [];
  const [low, high] = [counts[0][0], counts.at(-1)[0]];
  const width = Math.max(1, Math.ceil((high - low + 1) / MOST_BARS));
  const bars = [];
  for (let from = low; from <= high; from += width) {
    const to = from + width - 1;
    const words = width === 1 ? plural(from, noun) : `${whole(from)} to ${whole(to)} ${noun}s`;
    bars.push({ count: 0, label: whole(from), words });
  }
  for (const [value, count] of counts) bars[Math.floor((value - low) / width)].count += count;
  return bars;
}

// Bars for classes of lengths, from [upper end in seconds, count] in ascending order.
function barsOfLengths(classes) {
  return classes.map(([upperS, count], i) => {
    const lower = i ? duration(classes[i - 1][0]) : "0 s";
    if (!known(upperS)) return { count, label: "more", words: `more than ${lower}` };
    return { count, label: duration(upperS), words: `${lower} to ${duration(upperS)}` };
  });
}
