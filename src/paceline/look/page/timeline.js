// The timeline with its overview: zoom, selection, keyboard, and words about the place under the pointer.

const MOST_HEIGHT = 470;
const OVERVIEW = 36;

function timelinePanel() {
  const state = {
    content: null,
    view: { fromS: 0, toS: 1 },
    whole: true,
    place: null,
    drag: null,
    exact: false,
  };

  const picture = drawing(200, (context, width, height) =>
    drawTimeline(context, width, height, state, scroll.scrollTop),
  );
  const spacer = make("div", { class: "spacer" }, picture.canvas);
  const scroll = make(
    "div",
    {
      class: "rows",
      tabindex: 0,
      role: "group",
      "aria-label":
        "Timeline. The left and right arrows move the view or, with shift, the place that is read out. Up and down " +
        "go to another worker. Plus and minus zoom, and 0 shows the whole run.",
      onscroll: () => picture.redraw(),
      onwheel: onWheel,
      onpointerdown: onDown,
      onpointermove: onMove,
      onpointerup: onUp,
      onpointercancel: () => {
        state.drag = null;
        picture.redraw();
      },
      onpointerleave: () => {
        if (!state.drag) point(null, false);
      },
      onkeydown: onKey,
      onblur: () => point(null, false),
      ondblclick: (event) => zoom(1 / 3, timeAt(event)),
    },
    spacer,
  );
  const frame = make("div", { class: "frame" }, scroll);
  const words = tip(frame);
  const overview = drawing(OVERVIEW, (context, width, height) => drawOverview(context, width, height, state));
  const map = make(
    "div",
    {
      class: "overview",
      onpointerdown: (event) => {
        map.setPointerCapture(event.pointerId);
        centre(event);
      },
      onpointermove: (event) => {
        if (event.buttons & 1) centre(event);
      },
    },
    overview.canvas,
  );
  overview.label("The mean of all workers over the whole run; the shown time is outlined.");
  const where = make("output", { class: "where" });
  const tools = make(
    "div",
    { class: "tools", role: "group", "aria-label": "Zoom of the timeline" },
    button("−", () => zoom(2), { title: "Zoom out (key -)", "aria-label": "Zoom out" }),
    button("+", () => zoom(1 / 2), { title: "Zoom in (key +)", "aria-label": "Zoom in" }),
    button("←", () => pan(-0.5), { title: "Earlier (left arrow)", "aria-label": "Earlier" }),
    button("→", () => pan(0.5), { title: "Later (right arrow)", "aria-label": "Later" }),
    button("Whole run", () => showWhole(), { title: "Show the whole run (key 0)" }),
    where,
  );
  const note = make("p", { class: "note" });
  const data = details("Data of the shown time", () => shownPanel(state));
  const colors = make("div");
  const root = section("Timeline", colors, tools, map, frame, note, data.root);

  function set(fromS, toS) {
    const { startS, endS } = state.content;
    const wholeS = endS - startS;
    const spanS = Math.min(wholeS, Math.max(toS - fromS, Math.min(wholeS, 2e-3)));
    const begunS = Math.min(endS - spanS, Math.max(startS, fromS));
    state.view = { fromS: begunS, toS: begunS + spanS };
    state.whole = spanS >= wholeS * 0.9999;
    refresh();
  }

  function refresh() {
    const { content, view } = state;
    state.exact = showsIterations(content, view, Math.max(50, picture.canvas.clientWidth - GUTTER));
    const stepS = (view.toS - view.fromS) / 200;
    fill(where, `${clock(view.fromS, stepS, content.endS)} to ${clock(view.toS, stepS, content.endS)}`);
    picture.label(timelineWords(content, view, state.exact));
    picture.redraw();
    overview.redraw();
    data.show();
  }

  const showWhole = () => set(state.content.startS, state.content.endS);
  const pan = (share) => set(state.view.fromS + share * span(), state.view.toS + share * span());
  const span = () => state.view.toS - state.view.fromS;

  function zoom(factor, aroundS = (state.view.fromS + state.view.toS) / 2) {
    const spanS = Math.min(state.content.endS - state.content.startS, span() * factor);
    const share = (aroundS - state.view.fromS) / span();
    set(aroundS - share * spanS, aroundS - share * spanS + spanS);
  }

  function timeAt(event) {
    const box = picture.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - GUTTER) / (box.width - GUTTER);
    return state.view.fromS + Math.min(1, Math.max(0, share)) * span();
  }

  function placeAt(event) {
    const box = picture.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (x < GUTTER || y < 0 || y > box.height) return null;
    if (y < STRIP) {
      const pixels = (box.width - GUTTER) / span();
      const near = (mark) => Math.abs((mark.atS - state.view.fromS) * pixels - (x - GUTTER));
      const mark = state.content.marks.reduce(
        (best, each) => (best && near(best) <= near(each) ? best : each),
        null,
      );
      return mark && near(mark) < 8 ? { mark, x, y } : null;
    }
    const row = Math.floor((y - STRIP + scroll.scrollTop) / state.content.rowHeight);
    return row < state.content.timeline.workers.length ? { row, timeS: timeAt(event), x, y } : null;
  }

  // Show what is at a place. If `spoken` is true, because a key was pressed, also let a screen reader read it out.
  function point(place, spoken) {
    state.place = place;
    picture.redraw();
    if (!place) return words.hide();
    const { content } = state;
    const pixelS = span() / Math.max(50, picture.canvas.clientWidth - GUTTER);
    const lines = place.mark
      ? markWords(content, place.mark)
      : placeWords(content, place.row, place.timeS, state.exact, pixelS);
    words.at(place.x, place.y, lines);
    if (spoken) words.say(lines);
  }

  function onWheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.004))), timeAt(event));
  }

  function onDown(event) {
    if (event.button !== 0 || !placeAt(event)) return;
    if (event.pointerType === "touch") return point(placeAt(event), false); // dragging scrolls the page
    state.drag = { fromS: timeAt(event), toS: timeAt(event) };
    scroll.setPointerCapture(event.pointerId);
  }

  function onMove(event) {
    if (state.drag) state.drag.toS = timeAt(event);
    point(placeAt(event), false);
  }

  function onUp(event) {
    const { drag } = state;
    state.drag = null;
    if (!drag) return;
    const [fromS, toS] = [drag.fromS, timeAt(event)].sort((a, b) => a - b);
    if (((toS - fromS) / span()) * picture.canvas.clientWidth >= 6) set(fromS, toS);
    else point(placeAt(event), true);
    picture.redraw();
  }

  function centre(event) {
    const box = overview.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - GUTTER) / (box.width - GUTTER);
    const { startS, endS } = state.content;
    const middleS = startS + Math.min(1, Math.max(0, share)) * (endS - startS);
    set(middleS - span() / 2, middleS + span() / 2);
  }

  function onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (across && !event.shiftKey) pan(across * 0.2);
    else if (event.key === "+" || event.key === "=") zoom(1 / 2);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0") showWhole();
    else if (!across && !down) return;
    event.preventDefault();
    focusPlace(across && event.shiftKey ? across : 0, down ?? 0);
  }

  // Go from the last place that was read out to a place beside it, and read out the new place.
  function focusPlace(across, down) {
    const { content, view } = state;
    const before =
      state.place?.row === undefined ? { row: 0, timeS: (view.fromS + view.toS) / 2 } : state.place;
    const first = state.place?.row === undefined;
    const row = Math.min(content.timeline.workers.length - 1, Math.max(0, before.row + (first ? 0 : down)));
    const timeS = Math.min(view.toS, Math.max(view.fromS, before.timeS + (across * span()) / 100));
    const top = row * content.rowHeight;
    const room = scroll.clientHeight - STRIP - content.rowHeight;
    if (top < scroll.scrollTop) scroll.scrollTop = top;
    if (top > scroll.scrollTop + room) scroll.scrollTop = top - room;
    const x = GUTTER + ((timeS - view.fromS) / span()) * (picture.canvas.clientWidth - GUTTER);
    point({ row, timeS, x, y: STRIP + top - scroll.scrollTop + content.rowHeight / 2 }, true);
  }

  return {
    root,
    show: (report) => {
      const content = contentOf(report);
      root.hidden = !content;
      if (!content) return;
      state.content = content;
      const tall = STRIP + content.rowHeight * content.timeline.workers.length;
      spacer.style.height = `${tall}px`;
      scroll.style.height = `${Math.min(MOST_HEIGHT, tall)}px`;
      picture.resize(Math.min(MOST_HEIGHT, tall));
      fill(note, timelineNote(report.timeline));
      fill(colors, legend(totalTime(report.workers), false));
      if (state.whole) showWhole();
      else set(state.view.fromS, state.view.toS);
      if (state.place && !(state.place.row < content.timeline.workers.length)) point(null, false);
    },
  };
}

// What the timeline of a report shows; null if there is nothing to show.
function contentOf(report) {
  const { timeline } = report;
  const levels = timeline ? levelsOf(timeline) : null;
  const active = levels ? extentOf(levels[0]) : null;
  return (
    active && {
      timeline,
      levels,
      mean: meanLevel(levels),
      rows: exactRows(timeline),
      rowHeight: rowHeight(timeline.workers.length),
      // a worker joins shortly before it does anything, so its mark is moved into the shown time
      marks: report.marks.map((mark) => ({
        ...mark,
        atS: Math.min(active.endS, Math.max(active.startS, mark.time_s)),
      })),
      ...active,
    }
  );
}

function timelineNote(timeline) {
  const notes = [
    "Drag to select a time, or zoom with ctrl (cmd) and the wheel.",
    timeline.exact_from_s > 0
      ? `Single iterations are known from ${duration(timeline.exact_from_s)} on.`
      : "Zoomed in, single iterations are shown.",
  ];
  if (timeline.barriers_s.length)
    notes.push("Vertical lines are barriers, where they are not too close together.");
  if (timeline.error_s > 0)
    notes.push(`Times of different machines may be wrong by ${duration(timeline.error_s)}.`);
  return notes.join(" ");
}

function drawTimeline(context, width, height, state, scrollTop) {
  const { content, view } = state;
  if (!content) return;
  const { rowHeight: tall, timeline } = content;
  const first = Math.max(0, Math.floor(scrollTop / tall));
  const end = Math.min(timeline.workers.length, Math.ceil((scrollTop + height - STRIP) / tall));
  const rows = Array.from({ length: end - first }, (_, i) => first + i);
  const place = {
    left: GUTTER,
    top: STRIP + first * tall - scrollTop,
    width: width - GUTTER,
    height: tall,
    gap: tall > 20 ? 4 : 2,
  };
  if (state.exact) drawIterations(context, content, rows, view, place);
  else
    drawBuckets(
      context,
      levelFor(content.levels, ((view.toS - view.fromS) / place.width) * LEAST_COLUMN),
      rows,
      view,
      place,
    );
  context.textAlign = "right";
  context.textBaseline = "middle";
  rows.forEach((row, i) => {
    context.fillStyle = state.place?.row === row ? ink("--text") : ink("--quiet");
    context.fillText(
      `worker ${timeline.workers[row]}`,
      GUTTER - 8,
      place.top + i * tall + (tall - place.gap) / 2,
    );
  });
  context.clearRect(0, 0, width, STRIP); // rows that are scrolled away
  drawStrip(context, content, view, width, height, STRIP);
  const x = (timeS) => GUTTER + ((timeS - view.fromS) / (view.toS - view.fromS)) * (width - GUTTER);
  if (state.drag) {
    const [from, to] = [x(state.drag.fromS), x(state.drag.toS)].sort((a, b) => a - b);
    context.fillStyle = ink("--select");
    context.fillRect(from, STRIP, to - from, height - STRIP);
  }
  if (state.place?.row !== undefined) {
    const at = Math.round(x(state.place.timeS)) + 0.5;
    const top = STRIP + state.place.row * tall - scrollTop;
    context.strokeStyle = ink("--text");
    context.lineWidth = 1;
    line(context, at, top - 1, at, top + tall - place.gap + 1);
    context.strokeRect(GUTTER - 0.5, Math.round(top) - 0.5, width - GUTTER, tall - place.gap + 1);
  }
}

function drawOverview(context, width, height, state) {
  const { content, view } = state;
  if (!content) return;
  const place = { left: GUTTER, top: 0, width: width - GUTTER, height, gap: 0 };
  drawBuckets(context, content.mean, [0], { fromS: content.startS, toS: content.endS }, place);
  context.fillStyle = ink("--quiet");
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText("overview", GUTTER - 8, height / 2);
  const x = (timeS) =>
    GUTTER + ((timeS - content.startS) / (content.endS - content.startS)) * (width - GUTTER);
  context.fillStyle = ink("--veil");
  context.fillRect(GUTTER, 0, x(view.fromS) - GUTTER, height);
  context.fillRect(x(view.toS), 0, width - x(view.toS), height);
  context.strokeStyle = ink("--text");
  context.lineWidth = 1.5;
  context.strokeRect(
    x(view.fromS) + 0.75,
    0.75,
    Math.max(2, x(view.toS) - x(view.fromS) - 1.5),
    height - 1.5,
  );
}

// Seconds of each kind in the shown time, as a table.
function shownPanel(state) {
  let most = 1;
  const found = table(
    "Seconds of each kind in the shown time",
    [
      { title: "worker", value: (row) => row.worker, text: (row) => String(row.worker), number: true },
      ...kinds.map(({ name }) => ({
        title: `${kindWord(name)}, s`,
        value: (row) => row[name],
        text: (row) => fixed(row[name], decimalsFor(most)),
        number: true,
        needed: (row) => row[name] > 0,
      })),
    ],
    { tall: true },
  );
  return {
    root: found.root,
    show: () => {
      const { content, view } = state;
      const level = levelFor(content.levels, (view.toS - view.fromS) / 200);
      const rows = content.timeline.workers.map((worker, row) => ({
        worker,
        ...timeWithin(level, row, view.fromS, view.toS),
      }));
      most = Math.max(...rows.flatMap((row) => kinds.map((kind) => row[kind.name])));
      found.show(rows);
    },
  };
}
