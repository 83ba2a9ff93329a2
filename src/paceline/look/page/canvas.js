// A canvas that is as wide as its place, and is drawn again when its size, its content or the theme changes.

// `draw(context, width, height)` draws in CSS pixels, at most once per frame.
function drawing(height, draw) {
  const canvas = make("canvas", { role: "img", style: { height: `${height}px` } });
  let pending = false;
  const paint = () => {
    pending = false;
    const width = canvas.clientWidth;
    const tall = canvas.clientHeight;
    if (!width || !tall) return;
    const scale = devicePixelRatio || 1;
    const [columns, rows] = [Math.round(width * scale), Math.round(tall * scale)];
    if (canvas.width !== columns || canvas.height !== rows)
      Object.assign(canvas, { width: columns, height: rows });
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, tall);
    context.font = FONT;
    draw(context, width, tall);
  };
  const redraw = () => {
    if (!pending) requestAnimationFrame(paint);
    pending = true;
  };
  new ResizeObserver(redraw).observe(canvas);
  theme.changed.add(() => (theme.printing ? paint() : redraw()));
  return {
    canvas,
    redraw,
    label: (text) => canvas.setAttribute("aria-label", text),
    resize: (tall) => {
      canvas.style.height = `${tall}px`;
    },
  };
}

const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";

// Words beside the pointer or the focus. A screen reader reads them when the keyboard has asked for them.
function tip(frame) {
  const root = make("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  const spoken = make("div", { class: "spoken", role: "status" });
  frame.append(root, spoken);
  return {
    hide: () => {
      root.hidden = true;
    },
    say: (lines) => fill(spoken, lines.join(" ")),
    at: (x, y, lines) => {
      root.hidden = false;
      fill(
        root,
        lines.map((line) => make("div", {}, line)),
      );
      const left = x + 14 + root.offsetWidth > frame.clientWidth ? x - 14 - root.offsetWidth : x + 14;
      root.style.left = `${Math.max(0, Math.min(left, frame.clientWidth - root.offsetWidth))}px`;
      root.style.top = `${Math.max(0, y - root.offsetHeight - 10)}px`;
    },
  };
}
